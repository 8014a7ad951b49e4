"""A model with its AdamW optimizer: accumulated gradients, updates, and the files of a checkpoint.

The trainer's engine and the critic's share it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from relax_actors.algorithms.losses import add_metrics
from relax_actors.config.training import CriticSection, TrainerSection
from relax_actors.engines.protocols.samples import MicroBatchPlan
from relax_actors.engines.protocols.training import gradient_norms
from relax_actors.engines.torch.fake_quant import GridWeights
from relax_actors.engines.torch.host_memory import Movable, Tensors
from relax_actors.engines.torch.loss_scale import LossScale
from relax_actors.engines.torch.model import is_shared
from relax_actors.engines.torch.sharding import Whole
from relax_actors.engines.torch.strict_backward import end_strict_backward
from relax_actors.engines.torch.trained_weights import TrainedWeights
from relax_actors.weights import files as weights

OPTIMIZER = "optimizer.safetensors"
MODEL = "model.safetensors"
COPIES = "copies.safetensors"
"""Copies in float32 of weights on a grid."""

LossOf = Callable[[MicroBatchPlan], tuple[Tensor, dict[str, float]]]
"""Return the loss of the sequences of a micro-batch, and measurements to combine with `add_metrics`."""
Write = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class AdamW:
    """Settings of the optimizer; see [trainer] and [critic]. `trainer` says how the loss is scaled."""

    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    epsilon: float
    max_grad_norm: float
    trainer: TrainerSection

    @classmethod
    def of_trainer(cls, trainer: TrainerSection) -> AdamW:
        """Return the settings of the policy's optimizer."""
        rate, decay = trainer.learning_rate, trainer.weight_decay
        return cls(rate, decay, trainer.betas, trainer.epsilon, trainer.max_grad_norm, trainer)

    @classmethod
    def of_critic(cls, critic: CriticSection, trainer: TrainerSection) -> AdamW:
        """Return the settings of the critic's optimizer."""
        rate, decay = critic.learning_rate, critic.weight_decay
        return cls(rate, decay, trainer.betas, trainer.epsilon, critic.max_grad_norm, trainer)


class OptimizedModel:
    """A slot of an engine: the weights of a model that are trained, their gradients and their optimizer.

    Args:
        model: the model; every update changes its trained weights in place.
        weights: which of its weights are trained.
        settings: settings of the optimizer.
        sharding: how ranks share the model.
        grid: keeps weights on a grid; None if all bits of them are trained.

    Attributes:
        weights: which weights of the model are trained.
        measured: measurements of each micro-batch of this rank since the last update.
        micro_batches: measurements of each micro-batch of the last update, of all ranks.
        measures_gradients: whether `micro_batches` have norms of the gradients so far; see `MeasuresGradients`.
        memory: moves its tensors; held while others read the weights.
        beside: each returns tensors on the device besides its own, which move with them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: TrainedWeights,
        settings: AdamW,
        sharding: Whole,
        grid: GridWeights | None = None,
    ) -> None:
        self.model, self.weights, self._settings, self._sharding = model, weights, settings, sharding
        self._grid = grid
        self.measured: list[dict[str, float]] = []
        self.micro_batches: list[dict[str, float]] = []
        self.measures_gradients = False
        self._gradients: list[dict[str, float]] = []
        self.beside: list[Tensors] = []
        self.memory: Movable = sharding.movable(self._readable, self._unread)
        self.reset()

    def reset(self) -> None:
        """Create a new optimizer, without state."""
        self._scale, self._updates = LossScale.of(self._settings.trainer), 0
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimized = [self._optimized(p) for p in self._parameters]
        kinds = ([p for p in optimized if is_shared(p) is shared] for shared in (False, True))
        self._optimizer = torch.optim.AdamW(
            [{"params": kind} for kind in kinds if kind],  # torch updates them apart
            lr=self._settings.learning_rate,
            betas=self._settings.betas,
            eps=self._settings.epsilon,
            weight_decay=self._settings.weight_decay,
            fused=self.model.device.type in ("cpu", "cuda"),
        )

    def take_grid(self) -> None:
        """Move weights to the grid, if they are trained on one; call it when the model has got other weights."""
        if self._grid is not None:
            self._grid.take()

    def _optimized(self, weight: nn.Parameter) -> nn.Parameter:
        """Return the tensor that the optimizer updates for a weight: the weight, or its copy where it is on a grid."""
        return weight if self._grid is None else self._grid.copies.get(weight, weight)

    def discard(self) -> None:
        """Discard the accumulated gradients."""
        self.measured.clear()
        self._gradients.clear()
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters:
            parameter.grad = None

    def backward(self, plans: Iterable[MicroBatchPlan], loss_of: LossOf, progress: Callable[[], None]) -> None:
        """Run forward and backward, micro-batch by micro-batch."""
        for plan in plans:
            with self.dropping(len(self.measured)):
                loss, measured = loss_of(plan)
                try:
                    torch.autograd.backward(self._scale.scaled(loss))
                finally:
                    end_strict_backward()
            self.measured.append(measured)
            if self.measures_gradients:
                squares = self._sharding.squares(self.model.named_parameters())
                self._gradients.append(gradient_norms(squares, self._scale.value))
            progress()

    def dropping(self, part: int) -> AbstractContextManager[None]:
        """Return the context in which a micro-batch of the next update is computed; see `TrainedWeights`."""
        return self.weights.dropping(self._updates, part * self._sharding.count + self._sharding.rank)

    def update(
        self, learning_rate: float, scale_of: Callable[[dict[str, float]], float] = lambda _: 1.0
    ) -> dict[str, float]:
        """Multiply the accumulated gradients by `scale_of(measurements)`, clip them, and step.

        A weight that the step did not read, such as those of a tower in a step without media, has a gradient of 0. The
        step is skipped if gradients overflowed because of the loss scale.

        Raises:
            FloatingPointError: the norm of the gradients is not finite, for another reason.
        """
        self._complete_gradients()
        self._sharding.sum_gradients(self._parameters)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        everyone = self._sharding.all_gather(self.measured)
        measured, count = add_metrics(one for rank in everyone for one in rank), float(len(self.measured))
        gradients: Iterable[dict[str, float]] = self._gradients or repeat({})
        parts = (pair for rank in everyone for pair in zip(rank, gradients, strict=False))
        self.micro_batches = [one | norms for one, norms in parts if one]  # an idle one has no measurements
        if (scale := scale_of(measured) / self._scale.value) != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        norm = self._sharding.clip(self.model.parameters(), self._settings.max_grad_norm)
        of_update = self._scale.metrics_of(norm, measured.values())
        if "grad_norm" in of_update:
            for parameter in self._parameters:
                self._optimized(parameter).grad = parameter.grad
            self._optimizer.step()
            if self._grid is not None:
                self._grid.follow()
            self._updates += 1
        self.discard()
        return measured | of_update | {"micro_batches": count}

    def _complete_gradients(self) -> None:
        # AdamW would skip weights without a gradient. Megatron-Core cannot: it keeps one step number for all weights.
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _readable(self) -> Iterator[Tensor]:
        """Yield weights, and what is beside the model."""
        yield from self.model.parameters()
        for tensors in self.beside:
            yield from tensors()

    def _unread(self) -> Iterator[Tensor]:
        """Yield gradients, and the state of the optimizer."""
        yield from (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
        for entry in self._optimizer.state.values():
            yield from (value for value in entry.values() if isinstance(value, Tensor))
        yield from () if self._grid is None else self._grid.copies.values()

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors of a checkpoint by file name; the optimizer's by the number of the weight."""
        state = [self._optimizer.state.get(self._optimized(parameter), {}) for parameter in self._parameters]
        flat = {f"{i}.{name}": value for i, entry in enumerate(state) for name, value in entry.items()}
        files: dict[str, Mapping[str, Tensor]] = {MODEL: self.weights.tensors(), OPTIMIZER: flat}
        return files if self._grid is None else files | {COPIES: self._grid.tensors()}

    def writer(self, precision: str, state: Mapping[str, Mapping[str, Tensor]], unchanging: str | None = None) -> Write:
        """Return a function that writes the files of a checkpoint to a folder.

        Args:
            precision: precision of the published weights; those of the checkpoint are the optimizer's, in float32.
            state: tensors by file name.
            unchanging: copy the tensors now, but for those of this file, which never change; None for no copy.
        """
        copies, sharding = unchanging is not None, self._sharding
        writers = {f: sharding.writer(held, copy=copies and f != unchanging) for f, held in state.items()}
        facts = json.dumps({"engine": "torch", "precision": precision, "loss_scale": asdict(self._scale)})

        def write(folder: Path) -> None:
            for file, write_file in writers.items():
                write_file(folder / file)
            if sharding.rank == 0:
                (folder / weights.ENGINE).write_text(facts)

        return write

    def load(self, folder: Path) -> None:
        """Load the files of a checkpoint."""
        self.weights.copy(weights.load([folder / MODEL]), str(folder))
        if self._grid is not None:
            self._grid.take(weights.load([folder / COPIES]))
        self.reset()
        state: dict[int, dict[str, Tensor]] = {}
        places = {id(p): n for n, p in enumerate(p for group in self._optimizer.param_groups for p in group["params"])}
        for key, value in weights.load([folder / OPTIMIZER]).items():
            index, _, name = key.partition(".")
            weight = self._parameters[int(index)]
            of_weight = value.shape == weight.shape and value.dim() > 0
            entry = state.setdefault(places[id(self._optimized(weight))], {})
            entry[name] = self._sharding.own(weight, value) if of_weight else value.clone()
        tree = self._optimizer.state_dict()
        tree["state"] = state
        self._optimizer.load_state_dict(tree)
        self._updates = max((int(entry["step"]) for entry in state.values()), default=0)
        self._scale = LossScale(**json.loads((folder / weights.ENGINE).read_text())["loss_scale"])
