"""Section [simulate]: simulated engines that predict the speed of a cluster.

A file with this section needs no model, data or backends: `DEFAULTS` fills them in.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relax_actors.config.sections import Fraction, Positive, PositiveFloat, Section

NonNegative = Annotated[float, Field(ge=0)]

DEFAULTS: dict[str, Any] = {
    "model": {
        "architecture": {
            "model_type": "qwen3",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": 64,
        },
        "tokenizer": {"alphabet": "01>#"},
    },
    "data": {"kind": "python", "function": "relax_actors.simulation.tasks.make", "size": 1000},
    "rollout": {"backend": "simulated", "max_concurrent_prompts": 1, "max_tokens": 2},
    "trainer": {"backend": "simulated", "checkpoint_every": 1000000, "max_tokens_per_microbatch": 8},
}
"""Defaults of a file with [simulate]."""


class Distribution(Section):
    """A number, or a table with one of `constant`, `median`, `values` and `recorded`."""

    constant: NonNegative | None = None
    """Always this value; a plain number means the same."""
    median: PositiveFloat | None = None
    """Median of a log-normal distribution."""
    sigma: NonNegative = 0.0
    """Standard deviation of the logarithm, with `median`."""
    most: PositiveFloat | None = None
    """Upper limit of the values, with `median`."""
    values: list[NonNegative] | None = None
    """Equally spaced quantiles, from minimum to maximum; any number."""
    recorded: str | None = None
    """Finished run, by name or folder, whose measured values are used."""

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        return {"constant": value} if isinstance(value, int | float) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check_kind(self) -> Distribution:
        kinds = {"constant": self.constant, "median": self.median, "values": self.values, "recorded": self.recorded}
        if sum(value is not None for value in kinds.values()) != 1 or self.values == []:
            msg = f"a distribution is a number or a table with one of {', '.join(kinds)}"
            raise ValueError(msg)
        return self


ZERO = Distribution(constant=0.0)


class GenerationSection(Section):
    """[simulate.generation]: the speed of generation.

    A token takes `token_seconds` x (1 + `load` x running samples on its device).
    """

    tokens: Distribution = Distribution(constant=1.0)
    """Tokens per sample."""
    token_seconds: PositiveFloat | None = None
    """Seconds per token of a sample alone; if not set, [simulate.calibration] determines it."""
    load: NonNegative = 0.0
    """Share of `token_seconds` by which each running sample slows its device down."""
    row: Distribution | None = None
    """Seconds per row, in place of the fields above; independent of devices."""


class TrainingSection(Section):
    """[simulate.training]: a step takes `device_seconds` / devices + `fixed`."""

    device_seconds: PositiveFloat | None = None
    """Seconds of a step on one device; if not set, [simulate.calibration] determines it."""
    fixed: NonNegative = 0.0
    """Seconds of a step that do not shrink with more devices."""
    step: Distribution | None = None
    """Seconds per step, in place of the fields above; independent of devices."""


class PhasesSection(Section):
    """[simulate.phases]: seconds of the other phases."""

    reward: Distribution = ZERO
    """Reward of a row."""
    publish: Distribution = ZERO
    """Publication of weights, during which the trainer does not train."""
    load: Distribution = ZERO
    """Loading of weights in a rollout actor, during which it does not generate."""
    switch: Distribution = ZERO
    """Switch from generation to training and back, per colocated step."""
    checkpoint: Distribution = ZERO
    """Writing of a checkpoint."""


class CalibrationSection(Section):
    """[simulate.calibration]: a measured step, which determines values that are not set."""

    colocated_seconds: PositiveFloat
    """Measured seconds of a step in which generation and training take turns on all devices."""
    generation_share: Fraction
    """Share of `colocated_seconds` spent in generation."""


class SimulateSection(Section):
    """[simulate]: a cluster with simulated engines."""

    devices: Annotated[int, Field(gt=1)]
    """Devices of the cluster."""
    rollout_devices: Positive
    """Devices that generate when devices are not colocated; the others train."""
    move: Positive = 1
    """Step of the search for the best split, in devices."""
    placement: Literal["colocated", "separate"] = "separate"
    """Placement of a single run by `relax up`; `relax simulate` runs `colocated` and every value of `staleness`."""
    staleness: tuple[Annotated[int, Field(ge=0)], ...] = (0, 2)
    """Values of staleness.max that are simulated with separate devices."""
    steps: Positive = 10
    """Measured steps, in addition to those that fill and drain the pipeline."""
    time_scale: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Real seconds per simulated second."""
    generation: GenerationSection = GenerationSection()
    training: TrainingSection = TrainingSection()
    phases: PhasesSection = PhasesSection()
    calibration: CalibrationSection | None = None

    @model_validator(mode="after")
    def _check_split(self) -> SimulateSection:
        if self.rollout_devices >= self.devices:
            msg = (
                f"simulate.rollout_devices = {self.rollout_devices} leaves none of {self.devices} devices to train; "
                "lower it"
            )
            raise ValueError(msg)
        return self

    def devices_of(self, role: Literal["rollout", "trainer"]) -> int:
        """Return the number of devices of a role in this placement."""
        if self.placement == "colocated":
            return self.devices
        return self.rollout_devices if role == "rollout" else self.devices - self.rollout_devices
