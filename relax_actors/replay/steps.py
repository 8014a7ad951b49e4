"""Steps of a run computed again, and compared up to the first difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

from broker.subjects import RowId
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.messages import Batch, Checkpoint, CriticVersion
from relax_actors.replay.difference import (
    Difference,
    Figure,
    changed_cell,
    compare_figures,
    first_micro_batch,
    first_tensor,
    micro_batches_of,
)
from relax_actors.replay.models import Computed, Model
from relax_actors.replay.recording import Recording
from relax_actors.training.metric_of_step import BY_MICRO_BATCH
from relax_actors.training.step_rows import StepRows

Progress = Callable[[str], None]
"""Gets a line about each step before it is computed."""


@dataclass(slots=True)
class Replay:
    """Result of steps that were computed again.

    Attributes:
        model: "policy" or "critic".
        checkpoint: version of the checkpoint from which they were computed.
        steps: steps that were computed.
        recorded: fingerprint that was published for the weights after the last one; None if there is none.
        computed: fingerprint of the weights after the last one; None if none was computed.
        figures: figures of the last one by name.
        micro_batches: figures of its micro-batches by name; recorded ones are None where the log has none.
        rows: rows of each of these micro-batches; empty where ranks or several updates share rows.
        gradients: norm of each tensor's gradients at each of these micro-batches; empty if they were not measured.
        difference: first difference; None if all is equal.
    """

    model: str
    checkpoint: int
    steps: list[int] = field(default_factory=list)
    recorded: str | None = None
    computed: str | None = None
    figures: dict[str, Figure] = field(default_factory=dict)
    micro_batches: list[dict[str, Figure]] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    gradients: list[dict[str, float]] = field(default_factory=list)
    difference: Difference | None = None

    @property
    def equal(self) -> bool:
        """Whether the computation has everything in common with the record."""
        return self.difference is None

    def json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "checkpoint": self.checkpoint,
            "steps": self.steps,
            "recorded": self.recorded,
            "computed": self.computed,
            "equal": self.equal,
            "figures": {name: figure.json() for name, figure in self.figures.items()},
            "micro_batches": [
                {"rows": rows, **{name: each.json_of_micro_batch() for name, each in part.items()}, "gradients": norms}
                for part, rows, norms in zip(
                    self.micro_batches, chain(self.rows, repeat([])), chain(self.gradients, repeat({})), strict=False
                )
            ],
            "difference": None if self.difference is None else self.difference.json(),
        }


class Replayer:
    """Computes a model's steps again.

    Args:
        recording: the run.
        config: its configuration.
        name: "policy" or "critic".
        progress: called with a line for each step.
        gradients: whether the policy's gradients are measured, which takes time and memory beyond those of training.
    """

    def __init__(
        self,
        recording: Recording,
        config: Config,
        name: str,
        progress: Progress = lambda _: None,
        *,
        gradients: bool = False,
    ) -> None:
        self._recording, self._progress = recording, progress
        self.model = Model(recording, config, name)
        if gradients:
            self.model.measure_gradients()

    def replay(self, step: int) -> Replay:
        """Compute a step again from the newest checkpoint, comparing each step.

        Raises:
            ConfigError: the step was not trained, or not kept.
        """
        recording = self._recording
        recording.batch(step)
        checkpoint = recording.checkpoint_before(step, self.model.kind)
        result = Replay(self.model.name, checkpoint.version)
        result.difference = self._load(checkpoint)
        if result.difference is not None:
            result.recorded, result.computed = checkpoint.fingerprint, self.model.engine.fingerprint()
            return result
        batches = recording.cells("batch", range(checkpoint.version, step + 1), Batch)
        figures = recording.figures(*(("trainer", "step") if self.model.name == "policy" else ("critic", "critic")))
        for number in range(checkpoint.version, step + 1):
            self._progress(f"{self.model.name}: step {number}")
            if number not in batches:
                recording.batch(number)
            self._compare(number, batches[number], figures.get(number, {}), result)
            if result.difference is not None:
                break
        return result

    def advance(self, version: int) -> None:
        """Bring the model to a version, and check each published fingerprint.

        Raises:
            ConfigError: the version was not kept, or a computed step differs from the recorded one.
        """
        if version == 0 or version in self._recording.checkpoints(self.model.kind):
            checkpoint = self._recording.checkpoint_before(version, self.model.kind)
            if checkpoint.version == version:
                self.model.load(checkpoint)
                return
        result = self.replay(version - 1)
        if result.difference is not None:
            differing = result.difference
            msg = f"{self.model.name} {version} cannot be computed again: step {differing.step}: {differing.what}"
            raise ConfigError(msg)

    def _load(self, checkpoint: Checkpoint) -> Difference | None:
        """Load a checkpoint; return what was changed in it, if anything was."""
        try:
            self.model.load(checkpoint)
        except ConfigError as error:
            if not self.model.folder_of(checkpoint).is_dir():
                raise
            published = self._recording.weights([checkpoint.version]).get(checkpoint.version)
            tensor = None
            if self.model.name == "policy" and published is not None:
                tensor = self._tensor(published.tensors, self._damaged_prefixes(checkpoint))
            return Difference(str(error), checkpoint.version, self.model.name, tensor=tensor)
        return None

    def _damaged_prefixes(self, checkpoint: Checkpoint) -> bytes:
        try:
            return self.model.load_damaged(checkpoint)
        except Exception:  # noqa: BLE001 a damaged file may fail in any way; the message names it already
            return b""

    def _compare(self, step: int, batch: Batch, published: dict[str, Any], result: Replay) -> None:
        """Compute one step and compare inputs, figures and weights with what was recorded."""
        result.steps.append(step)
        result.recorded, result.computed = self._fingerprint(step + 1), None
        try:
            rows = self.model.read(step, batch)
            changed = self._changed_input(step, batch, rows)
            computed = self.model.compute(step, batch, rows)
        except ConfigError as error:
            result.difference = Difference(str(error), step, self.model.name)
            return
        result.computed = computed.fingerprint
        result.figures = compare_figures(published, computed.figures) if published else {}
        recorded = published.get(BY_MICRO_BATCH)
        result.gradients = computed.gradients
        result.micro_batches = micro_batches_of(recorded if isinstance(recorded, dict) else {}, computed.micro_batches)
        places = self.model.rows_of_micro_batches(rows, len(result.micro_batches))
        result.rows = [[str(RowId(step, batch.rows[position])) for position in part] for part in places]
        result.difference = changed or self._changed_result(step, computed, result)

    def _changed_input(self, step: int, batch: Batch, rows: StepRows) -> Difference | None:
        place = changed_cell(batch.digests, rows.digests, len(rows))
        if place is None:
            return None
        position, column = place
        row = RowId(step, batch.rows[position])
        what = f"cell {row}.{column} is not the cell that the step was trained on: its content has changed since"
        micro_batch = self.model.micro_batch_of(rows, position)
        return Difference(what, step, self.model.name, micro_batch=micro_batch, row=str(row), column=column)

    def _changed_result(self, step: int, computed: Computed, result: Replay) -> Difference | None:
        figure = next((name for name, each in result.figures.items() if not each.equal), None)
        if figure is None and computed.fingerprint == result.recorded:
            return None
        tensor = None
        if computed.fingerprint != result.recorded and self.model.name == "policy":
            published = self._recording.weights([step + 1]).get(step + 1)
            tensor = None if published is None else self._tensor(published.tensors, computed.prefixes)
        what = (
            "the same rows, from the same weights, give other numbers: settings, code, libraries or the kind of "
            "processor are not those of the run"
        )
        if result.recorded is None:
            what = f"no weights were published after step {step}: the run ended or was killed while it computed"
        shown = result.figures.get(figure or "", Figure(None, None))
        difference = Difference(
            what, step, self.model.name, None, None, None, figure, tensor, shown.recorded, shown.computed
        )
        place = first_micro_batch(result.micro_batches)
        if place is None:
            return difference
        number, figure = place
        shown = result.micro_batches[number][figure]
        rows = result.rows[number] if result.rows else None
        return replace(
            difference,
            micro_batch=number,
            rows=rows,
            figure=figure,
            recorded=shown.recorded,
            computed=shown.computed,
        )

    def _fingerprint(self, version: int) -> str | None:
        if self.model.name == "policy":
            weights = self._recording.weights([version]).get(version)
            return None if weights is None else weights.fingerprint
        critic = self._recording.cells("critic", [version], CriticVersion).get(version)
        return None if critic is None else critic.fingerprint

    def _tensor(self, recorded: bytes, computed: bytes) -> str | None:
        """Return the name of the first tensor whose digests differ; None if it cannot be told."""
        number = first_tensor(recorded, computed)
        if number is None:
            return None
        names = self.model.tensor_names()
        return names[number] if number < len(names) else None
