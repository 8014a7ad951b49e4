"""One rank of a Megatron-Core trainer. With one rank it is the whole engine; a group calls all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from relax_actors.algorithms.losses import add_metrics, sft_loss
from relax_actors.algorithms.schedules import rate_of
from relax_actors.config.schema import Config
from relax_actors.engines.megatron.architecture import Architecture
from relax_actors.engines.megatron.conversion import Conversion, Stored
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore import checkpoint, process
from relax_actors.engines.megatron.mcore.frozen import freeze
from relax_actors.engines.megatron.mcore.optimizer import Optimizer
from relax_actors.engines.megatron.mcore.parts import Part, PartTensors
from relax_actors.engines.megatron.mcore.passes import LossOf, Passes
from relax_actors.engines.megatron.mcore.rank_weights import RankWeights
from relax_actors.engines.megatron.mcore.replay import Replay
from relax_actors.engines.megatron.mcore.transformer import Chunks, padded_vocabulary
from relax_actors.engines.protocols.sequences import Sequences
from relax_actors.engines.protocols.training import StepResult, TrainBatch
from relax_actors.engines.protocols.whole_step import WholeStep
from relax_actors.engines.torch import replay_metrics as replayed
from relax_actors.engines.torch.model import build, copy_into, has_weights, tensors_of
from relax_actors.engines.torch.objective import StepObjective, check_norm
from relax_actors.weights.encoder import WeightEncoder
from relax_actors.weights.protocol import Content


class MegatronEngine(WholeStep):
    """A rank with its part of the model. All ranks must call the same methods with the same arguments, in order.

    Only rank 0 writes published weights and exports; what a step measured is the same on all ranks.

    Args:
        config: the run's.
        rank: of this process.
        store: through which the ranks find each other; not needed by a rank that is alone.
    """

    def __init__(self, config: Config, rank: int = 0, store: Store | None = None) -> None:
        super().__init__()
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._config, self._rank = config, rank
        self._layout = layout = Layout.of(config.trainer.megatron)
        process.check_device(config.trainer.device, "trainer.device")
        process.begin(layout, rank, store or HashStore())
        self._device = process.device()
        self._architecture = Architecture.of(config.model_path)
        self._passes = Passes(config, self._architecture, layout)
        self._chunks = Chunks(config, self._architecture, layout)
        conversion = Conversion(self._architecture, padded_vocabulary(self._architecture, layout))
        self._weights = RankWeights(self._chunks.bare, conversion)
        freeze(self._chunks.bare, self._weights.parameters, conversion, config.trainer.freeze)
        self._optimizer = Optimizer(config, self._chunks)
        self._replay = None
        if config.trainer.router_replay:
            recomputed = config.trainer.megatron.recompute == "full"
            self._replay = Replay(self._chunks.bare, recomputed=recomputed, sequence=layout.sequence)
        self._reference: Chunks | None = None
        self._encoder = WeightEncoder(self._gathered, remembers=config.publishes_deltas)
        self._now: dict[str, Tensor] | None = None

    def initialise(self, seed: int) -> None:
        """Take the folder's weights or random ones; see the protocol."""
        path = self._config.model_path
        source: Mapping[str, Tensor]
        source = Stored(sorted(path.glob("*.safetensors"))) if has_weights(path) else tensors_of(build(path, seed=seed))
        self._weights.take(source)
        self._optimizer.begin()
        self._changed()

    def finish_warm_start(self) -> None:
        """A fresh optimizer, and the reference; see the protocol."""
        self._optimizer.begin()
        if self._config.computes_reference:
            reference = self._new_reference()
            for ours, theirs in zip(reference.bare, self._chunks.bare, strict=True):
                ours.load_state_dict(theirs.state_dict())

    def _new_reference(self) -> Chunks:
        self._reference = Chunks(self._config, self._architecture, self._layout)
        for model in self._reference.wrapped:
            model.train(mode=False)
            model.requires_grad_(False)
        return self._reference

    def warm_start(self, sequences: Sequences, learning_rate: float, progress: Callable[[], None]) -> StepResult:
        """One supervised step; see the protocol."""
        tokens = sum(len(c) for c in sequences.completions)

        def loss_of(_: int, part: PartTensors, logprobs: Tensor) -> tuple[Tensor, dict[str, float]]:
            loss = sft_loss(logprobs, part.mask, tokens)
            return loss, {"loss": float(loss.detach())}

        parts = self._passes.parts(sequences)
        measured, _ = self._told(self._train(parts, sequences, loss_of, progress, temperature=1.0), [])
        norm = self._step(learning_rate, 1.0)
        return StepResult(measured | {"gradient_norm": norm, "micro_batches": float(len(parts))})

    def step_on(self, batch: TrainBatch, step: int, progress: Callable[[], None]) -> StepResult:
        """One optimizer step; see `WholeStep`."""
        sequences = batch.sequences
        rate = rate_of(self._config, step)
        objective = StepObjective(self._config.algorithm)
        parts = self._passes.parts(sequences)
        scored = self._reference_of(batch, parts, progress)
        compared = self._without_replay(batch, parts, progress) if step % replayed.EVERY == 0 else []

        def loss_of(number: int, part: PartTensors, logprobs: Tensor) -> tuple[Tensor, dict[str, float]]:
            indices = parts[number].indices
            rows = len(indices)  # rows of padding are no sequences, not even ones without tokens
            padded = partial(self._padded, indices, part.width)
            proximal, given = batch.proximal_logprobs, batch.reference_logprobs
            reference = padded(given) if given is not None else scored[number][1] if scored else None
            return objective.loss(
                logprobs[:rows],
                padded(batch.old_logprobs),
                torch.from_numpy(np.array(batch.advantages[indices], np.float32)).to(self._device),
                part.mask[:rows],
                actor_fwd=padded(proximal) if proximal is not None else None,
                reference=reference[:rows] if reference is not None else None,
            )

        figures = self._train(parts, sequences, loss_of, progress)
        if self._replay is not None and sequences.experts is not None:
            compared.append(self._replay.choices.take())
        measured, objective.log_ratios = self._told(figures, objective.log_ratios, compared)
        norm = self._step(rate, objective.factor(measured))
        own = {"gradient_norm": norm, "micro_batches": float(len(parts)), "learning_rate": rate}
        return StepResult(objective.figures(measured) | own)

    def _padded(self, indices: Sequence[int], width: int, arrays: Sequence[NDArray[Any]]) -> Tensor:
        """Values of the completions' tokens as a micro-batch has them, `[indices, width] float32`."""
        out = np.zeros((len(indices), width), np.float32)
        for row, index in enumerate(indices):
            out[row, : len(arrays[index])] = arrays[index]
        return torch.from_numpy(out).to(self._device)

    def _reference_of(
        self, batch: TrainBatch, parts: list[Part], progress: Callable[[], None]
    ) -> dict[int, tuple[PartTensors, Tensor]]:
        """Log-probs of the reference by number of micro-batch, where they are computed here."""
        if batch.reference_logprobs is not None or self._reference is None:
            return {}
        return self._passes.score(self._reference.wrapped, parts, batch.sequences, progress)

    def _without_replay(
        self, batch: TrainBatch, parts: list[Part], progress: Callable[[], None]
    ) -> list[dict[str, float]]:
        """What the first micro-batch of each rank of data parallelism gives without replay."""
        if self._replay is None or batch.sequences.experts is None:
            return []
        # Virtual stages take micro-batches in rounds of so many as there are stages.
        some = parts[: self._layout.pipeline if self._layout.virtual > 1 else 1]
        self._replay.begin(uses=False, trains=False)
        scored = self._passes.score(self._optimizer.models, some, batch.sequences, progress, self._replay)
        found = [replayed.unreplayed(self._replay.choices.take())]
        for number, (part, logprobs) in scored.items() if self._speaks else ():
            indices, rows = some[number].indices, len(some[number].indices)
            rollout = self._padded(indices, part.width, batch.old_logprobs)
            found.append(replayed.without_replay(logprobs[:rows], rollout, part.mask[:rows]))
        return found

    @property
    def _speaks(self) -> bool:
        """Whether this rank speaks for those that computed the same losses: the first of the last stage's."""
        return bool(
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        )

    def _told(
        self, measured: list[dict[str, float]], ratios: list[NDArray[Any]], own: Sequence[dict[str, float]] = ()
    ) -> tuple[dict[str, float], list[NDArray[Any]]]:
        """Figures of all ranks, added up, and the ratios of all micro-batches.

        Args:
            measured: of the micro-batches, the same on ranks that share them.
            ratios: the same.
            own: of this rank alone.
        """
        told = process.told_by_all([*((measured, ratios) if self._speaks else ([], [])), list(own)])
        figures = add_metrics(part for one, _, rest in told for part in [*one, *rest])
        return figures, [array for _, some, _ in told for array in some]

    def _train(
        self,
        parts: list[Part],
        sequences: Sequences,
        loss_of: LossOf,
        progress: Callable[[], None],
        temperature: float | None = None,
    ) -> list[dict[str, float]]:
        """Add the gradients of all micro-batches up; what each measured, on the ranks of the last stage."""
        self._optimizer.clear()
        if self._replay is not None:
            self._replay.begin(uses=True, trains=True)
        models = self._optimizer.models
        return self._passes.run(
            models, parts, sequences, loss_of, progress, temperature=temperature, replay=self._replay
        )

    def _step(self, rate: float, factor: float) -> float:
        norm = self._optimizer.step(rate, factor)
        check_norm(norm)
        self._changed()
        return norm

    def _changed(self) -> None:
        self._now = None
        self._encoder.changed()

    def _gathered(self) -> dict[str, Tensor]:
        """The weights as they are published, on rank 0; all ranks take part when they have changed."""
        if self._now is None:
            self._now = dict(self._weights.give())
        return self._now

    def publish(self, path: Path) -> str:
        """Write the weights; see the protocol. On other ranks than 0 it takes part and gives nothing."""
        self._gathered()
        return self._encoder.whole(path) if self._rank == 0 else ""

    def delta(self) -> Callable[[Path], str] | None:
        """What writes the change since `remember`, on rank 0; see the protocol."""
        self._gathered()
        return self._encoder.delta() if self._rank == 0 else None

    def remember(self) -> None:
        """Take the weights for the base of the next delta; see the protocol."""
        self._gathered()
        if self._rank == 0:
            self._encoder.remember()

    def contents(self) -> list[Content]:
        """The weights in memory; see `Offers`."""
        return self._encoder.contents()

    def fingerprint(self) -> str:
        """Fingerprint of the weights, on rank 0; see the protocol."""
        self._gathered()
        return self._encoder.fingerprint() if self._rank == 0 else ""

    def save(self, folder: Path) -> None:
        """Write a checkpoint, each rank its part; see the protocol."""
        checkpoint.save(folder, self._layout, self._optimizer, self._reference)

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Write a copy meanwhile, each rank its part; see `SavesMeanwhile`."""
        return checkpoint.begin(folder, self._layout, self._optimizer, self._reference)

    def load(self, folder: Path) -> None:
        """Take a checkpoint, whatever the layout it was written with; see the protocol."""
        reference = self._new_reference() if checkpoint.has_reference(folder) else None
        checkpoint.load(folder, self._layout, self._optimizer, reference)
        self._changed()

    def export(self, folder: Path) -> None:
        """Write a model folder, from rank 0; see the protocol."""
        tensors = self._gathered()
        if self._rank == 0:
            model = build(self._config.model_path, dtype=getattr(torch, self._config.trainer.precision))
            copy_into(model, tensors, "training")
            model.save_pretrained(folder)
