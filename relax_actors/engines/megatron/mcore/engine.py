"""One rank of a Megatron-Core trainer. With one rank it is the whole engine; a group calls all of them alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch._C._distributed_c10d import HashStore, Store

from relax_actors.algorithms.losses import add_metrics, sft_loss
from relax_actors.algorithms.schedules import rate_of
from relax_actors.config.schema import Config
from relax_actors.engines.announcing import Announcer
from relax_actors.engines.megatron.architecture import Architecture
from relax_actors.engines.megatron.conversion import Conversion, Stored
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore import checkpoint, process
from relax_actors.engines.megatron.mcore.logprobs import completion_logprobs, here
from relax_actors.engines.megatron.mcore.optimizer import Optimizer
from relax_actors.engines.megatron.mcore.parts import Part, PartTensors, parts_of
from relax_actors.engines.megatron.mcore.rank_weights import RankWeights
from relax_actors.engines.megatron.mcore.transformer import Chunks, padded_vocabulary
from relax_actors.engines.model import build, copy_into, has_weights, tensors_of
from relax_actors.engines.sequences import Sequences
from relax_actors.engines.taking import Content
from relax_actors.engines.training.objective import StepObjective
from relax_actors.engines.training.protocol import StepResult, TrainBatch
from relax_actors.engines.training.whole import Whole

LossOf = Callable[[int, PartTensors, Tensor], tuple[Tensor, dict[str, float]]]


class MegatronEngine(Whole):
    """A rank with its part of the model. All ranks must call the same methods with the same arguments, in order.

    Only rank 0 writes announced weights and exports; what a step measured is the same on all ranks.

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
        process.check_device(config.trainer.device)
        process.begin(layout, rank, store or HashStore())
        self._device = process.device()
        self._talk = process.talk()
        self._architecture = Architecture.of(config.model_path)
        self._chunks = Chunks(config, self._architecture, layout)
        self._optimizer = Optimizer(config, self._chunks)
        self._conversion = Conversion(self._architecture, padded_vocabulary(self._architecture, layout))
        self._weights = RankWeights(self._chunks.bare, self._conversion, self._talk)
        self._reference: Chunks | None = None
        self._announcer = Announcer(self._gathered, remembers=config.publishes_deltas)
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

        parts = self._parts(sequences)
        measured, _ = self._train(parts, sequences, loss_of, 1.0, progress)
        norm = self._step(learning_rate, 1.0)
        return StepResult(measured | {"gradient_norm": norm, "micro_batches": float(len(parts))})

    def step_on(self, batch: TrainBatch, step: int, progress: Callable[[], None]) -> StepResult:
        """One optimizer step; see `Whole`."""
        sequences = batch.sequences
        rate = rate_of(self._config, step)
        objective = StepObjective(self._config.algorithm)
        parts = self._parts(sequences)
        scored = self._scored(batch, parts, progress)

        def loss_of(number: int, part: PartTensors, logprobs: Tensor) -> tuple[Tensor, dict[str, float]]:
            indices = parts[number].indices
            rows = len(indices)  # rows of padding are no sequences, not even ones without tokens
            padded = partial(self._padded, indices, part.width)
            proximal, given = batch.proximal_logprobs, batch.reference_logprobs
            reference = padded(given) if given is not None else scored.get(number)
            return objective.loss(
                logprobs[:rows],
                padded(batch.old_logprobs),
                torch.from_numpy(np.array(batch.advantages[indices], np.float32)).to(self._device),
                part.mask[:rows],
                actor_fwd=padded(proximal) if proximal is not None else None,
                reference=reference[:rows] if reference is not None else None,
            )

        temperature = self._config.rollout.temperature
        measured, objective.log_ratios = self._train(parts, sequences, loss_of, temperature, progress, objective)
        norm = self._step(rate, objective.factor(measured))
        figures = objective.figures(measured)
        own = {"gradient_norm": norm, "micro_batches": float(len(parts)), "learning_rate": rate}
        return StepResult(figures | own)

    def _parts(self, sequences: Sequences) -> list[Part]:
        """The micro-batches of this rank."""
        shares = parts_of(sequences.lengths, self._layout, self._config.trainer.token_budget)
        return shares[parallel_state.get_data_parallel_rank()]

    def _padded(self, indices: Sequence[int], width: int, arrays: Sequence[NDArray[Any]]) -> Tensor:
        """Values of the completions' tokens as a micro-batch has them, `[indices, width] float32`."""
        out = np.zeros((len(indices), width), np.float32)
        for row, index in enumerate(indices):
            out[row, : len(arrays[index])] = arrays[index]
        return torch.from_numpy(out).to(self._device)

    def _scored(self, batch: TrainBatch, parts: list[Part], progress: Callable[[], None]) -> dict[int, Tensor]:
        """Log-probs of the reference by number of micro-batch, on the ranks that compute losses."""
        found: dict[int, Tensor] = {}
        if batch.reference_logprobs is not None or self._reference is None:
            return found

        def keep(number: int, _: PartTensors, logprobs: Tensor) -> tuple[Tensor, dict[str, float]]:
            found[number] = logprobs
            return logprobs.sum(), {}

        with torch.no_grad():
            temperature = self._config.rollout.temperature
            models = self._reference.wrapped
            self._run(models, parts, batch.sequences, keep, temperature, progress, forward_only=True)
        return found

    def _train(
        self,
        parts: list[Part],
        sequences: Sequences,
        loss_of: LossOf,
        temperature: float,
        progress: Callable[[], None],
        objective: StepObjective | None = None,
    ) -> tuple[dict[str, float], list[NDArray[Any]]]:
        """Add the gradients of all micro-batches up; what they measured, joined over all ranks."""
        self._optimizer.clear()
        measured = self._run(self._optimizer.models, parts, sequences, loss_of, temperature, progress)
        # One rank speaks for those that computed the same: the first of the last stage's.
        speaks = (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        )
        ratios = objective.log_ratios if objective is not None else []
        everywhere: list[Any] = [None] * self._layout.ranks
        distributed.all_gather_object(everywhere, (measured, ratios) if speaks else None, group=self._talk)
        told = [one for one in everywhere if one is not None]
        return add_metrics(part for one, _ in told for part in one), [array for _, some in told for array in some]

    def _run(
        self,
        models: Sequence[Any],
        parts: list[Part],
        sequences: Sequences,
        loss_of: LossOf,
        temperature: float,
        progress: Callable[[], None],
        *,
        forward_only: bool = False,
    ) -> list[dict[str, float]]:
        """Pass micro-batches through the pipeline; what each measured, on the ranks of the last stage."""
        measured: list[dict[str, float]] = []
        vocabulary = self._architecture.vocabulary

        def loss(number: int, tensors: PartTensors, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
            logprobs = completion_logprobs(logits, tensors, temperature, vocabulary)
            value, figures = loss_of(number, tensors, logprobs)
            measured.append(figures)
            return value, torch.zeros((), dtype=torch.int, device=self._device), {}

        def forward(numbers: Iterator[int], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(numbers)
            progress()
            tensors = PartTensors.of(parts[number], sequences, self._device)
            output = model(input_ids=here(tensors.tokens), position_ids=None, attention_mask=None)
            return output, partial(loss, number, tensors)

        numbers = [iter(range(len(parts))) for _ in models]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=numbers if len(models) > 1 else numbers[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=len(parts),
            seq_length=parts[0].length,
            micro_batch_size=parts[0].rows,
            forward_only=forward_only,
        )
        return measured

    def _step(self, rate: float, factor: float) -> float:
        norm = self._optimizer.step(rate, factor)
        if not math.isfinite(norm):
            msg = f"gradient norm is {norm}: the loss diverged; lower trainer.learning_rate or clip the ratio tighter"
            raise FloatingPointError(msg)
        self._changed()
        return norm

    def _changed(self) -> None:
        self._now = None
        self._announcer.changed()

    def _gathered(self) -> dict[str, Tensor]:
        """The weights as they are announced, on rank 0; all ranks take part when they have changed."""
        if self._now is None:
            self._now = dict(self._weights.give())
        return self._now

    def announce(self, path: Path) -> str:
        """Write the weights; see the protocol. On other ranks than 0 it takes part and gives nothing."""
        self._gathered()
        return self._announcer.whole(path) if self._rank == 0 else ""

    def delta(self) -> Callable[[Path], str] | None:
        """What writes the change since `remember`, on rank 0; see the protocol."""
        self._gathered()
        return self._announcer.delta() if self._rank == 0 else None

    def remember(self) -> None:
        """Take the weights for the base of the next delta; see the protocol."""
        self._gathered()
        if self._rank == 0:
            self._announcer.remember()

    def contents(self) -> list[Content]:
        """The weights in memory; see `Offers`."""
        return self._announcer.contents()

    def fingerprint(self) -> str:
        """Fingerprint of the weights, on rank 0; see the protocol."""
        self._gathered()
        return self._announcer.fingerprint() if self._rank == 0 else ""

    def save(self, folder: Path) -> None:
        """Write a checkpoint, each rank its part; see the protocol."""
        checkpoint.save(folder, self._layout, self._optimizer, self._reference)

    def load(self, folder: Path) -> None:
        """Take a checkpoint, whatever the layout it was written with; see the protocol."""
        reference = self._new_reference() if checkpoint.has_reference(folder) else None
        checkpoint.load(folder, self._layout, self._optimizer, reference)
        self._changed()

    def export(self, folder: Path) -> None:
        """Write a model folder, from rank 0; see the protocol."""
        tensors = self._gathered()
        if self._rank == 0:
            model = build(self._config.model_path, dtype=getattr(torch, self._config.trainer.dtype))
            copy_into(model, tensors, "training")
            model.save_pretrained(folder)
