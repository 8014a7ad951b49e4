"""Policy and critic of a run, computed again from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

import relax_actors.engines.lean_imports  # noqa: F401 as in actors, before an engine imports transformers
from relax_actors.algorithms.micro_batches import split_rows
from relax_actors.config import Config
from relax_actors.engines.backends import critic_backend, critic_section, training_backend
from relax_actors.engines.protocols.training import MeasuresGradients, TrainingEngine
from relax_actors.errors import ConfigError, RelaxError
from relax_actors.messages import Batch, Checkpoint
from relax_actors.replay.recording import Recording
from relax_actors.runtime import durable_folder
from relax_actors.training.checkpointer import RoleState, load_checkpoint
from relax_actors.training.metric_of_step import figures_of_step, gradients_of_micro_batches, micro_batch_figures
from relax_actors.training.step_feed import StepFeed, proximal_score
from relax_actors.training.step_rows import StepReader, StepRows
from relax_actors.weights.protocols import SupportsPrefixes


@dataclass(frozen=True, slots=True)
class Computed:
    """A step as it was computed again.

    Attributes:
        figures: its figures, as the role publishes them.
        fingerprint: fingerprint of the weights after it.
        prefixes: digests of their first tensors, see `Weights.tensors`; empty if the engine gives none.
        micro_batches: figures of its micro-batches, a list by name.
        gradients: norm of each tensor's gradients at each of these micro-batches; empty if they were not measured.
    """

    figures: Mapping[str, Any]
    fingerprint: str
    prefixes: bytes = b""
    micro_batches: Mapping[str, list[float]] = field(default_factory=dict)
    gradients: list[dict[str, float]] = field(default_factory=list)


class Model:
    """A model of a run ("policy" or "critic") and the feed of its steps."""

    def __init__(self, recording: Recording, config: Config, name: str) -> None:
        self.name, self._recording, self._config = name, recording, config
        self._max_tokens = config.trainer.max_tokens_per_microbatch
        context = recording.context("trainer" if name == "policy" else "critic", config)
        reader = StepReader(context, {})
        self._state: RoleState | None = None
        if name == "policy":
            self.engine: Any = training_backend(config).build(context)
            self._feed = StepFeed(context, self.engine, reader, proximal_score(config, self.engine))
            self._state = self._feed.statistics
        else:
            self.engine = critic_backend(critic_section(config)).build(context)
            self._feed = StepFeed(context, self.engine, reader, section="critic")

    @property
    def kind(self) -> str:
        """Kind of the cells of its checkpoints."""
        return "checkpoint" if self.name == "policy" else "critic_checkpoint"

    def folder_of(self, checkpoint: Checkpoint) -> Path:
        """Folder of a checkpoint."""
        return self._recording.at.folder.root / checkpoint.path

    def measure_gradients(self) -> None:
        """Measure the gradients of the policy in each micro-batch, where its engine can."""
        if self.name == "policy" and isinstance(self.engine, MeasuresGradients):
            self.engine.measure_gradients()

    def load(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint; raises as `load_checkpoint`."""
        load_checkpoint(self.folder_of(checkpoint), checkpoint, self.engine, self._state)

    def load_damaged(self, checkpoint: Checkpoint) -> bytes:
        """Load a changed checkpoint's weights; return digests of its leading tensors."""
        self.engine.load(self.folder_of(checkpoint))
        return self.prefixes()

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the present state."""
        self.engine.save(folder)
        if self._state is not None:
            self._state.save(folder)
        durable_folder.seal(folder)

    def read(self, step: int, batch: Batch) -> StepRows:
        """Read the rows of a batch; raises ConfigError if one cannot be read."""
        return self._feed.replay(step, batch.rows)

    def micro_batch_of(self, rows: StepRows, position: int) -> int:
        """Return the number of the micro-batch that has a row, by the row's position in the batch."""
        parts = split_rows(rows.lengths, max_tokens=self._max_tokens)
        return next(number for number, part in enumerate(parts) if position in part)

    def rows_of_micro_batches(self, rows: StepRows, count: int) -> list[list[int]]:
        """Return the rows of `count` micro-batches; empty if ranks or updates share rows."""
        parts = split_rows(rows.lengths, max_tokens=self._max_tokens)
        alone = self._config.trainer.updates == 1 and training_backend(self._config).ranks(self._config).count == 1
        return [list(part) for part in parts] if alone and len(parts) == count else []

    def compute(self, step: int, batch: Batch, rows: StepRows) -> Computed:
        """Compute a step on rows of `read`; raises ConfigError for unusable numbers."""
        try:
            parts: Mapping[str, list[float]] = {}
            gradients: list[dict[str, float]] = []
            if self.name == "policy":
                result = self._feed.finish_policy(lambda: None)
                figures = figures_of_step(self._config, step, batch, rows, result.metrics)
                parts = micro_batch_figures(result.micro_batches)
                gradients = gradients_of_micro_batches(result.micro_batches)
            else:
                measured = self._feed.finish(lambda: None).metrics
                figures = {name: round(float(value), 6) for name, value in measured.items()}
        except (ValueError, FloatingPointError, RelaxError) as error:
            msg = f"step {step} cannot be computed: {error}"
            raise ConfigError(msg) from error
        return Computed(figures, self.engine.fingerprint(), self.prefixes(), parts, gradients)

    def prefixes(self) -> bytes:
        """Return digests of the present weights' leading tensors; empty if unknown."""
        return self.engine.prefixes() if isinstance(self.engine, SupportsPrefixes) else b""

    def publish(self, stem: str) -> tuple[str, list[Path]]:
        """Write the present weights to the scratch folder; return their fingerprint and files."""
        engine: TrainingEngine = self.engine
        files = [self._recording.scratch / f"{stem}.{number}.safetensors" for number in range(engine.shards)]
        return engine.publish(*files), files

    def tensor_names(self) -> list[str]:
        """Return the names of the published tensors, in order."""
        names: list[str] = []
        for file in self.publish("named")[1]:
            with safe_open(file, framework="np") as tensors:
                names += tensors.keys()
        return sorted(names)

    def close(self) -> None:
        """End the ranks of the engine, if it has any."""
        close = getattr(self.engine, "close", None)
        if close is not None:
            close()
