"""[simulate]: engines that only take time, to predict how a cluster that one does not have would fare.

A file with this section is a run with simulated engines: model, data and backends need not be said.
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
"""What a file with [simulate] need not say."""


class Distribution(Section):
    """A number, or a table with one of `constant`, `median`, `values` and `recorded`."""

    constant: NonNegative | None = None
    """What a bare number means."""
    median: PositiveFloat | None = None
    """Of a log-normal."""
    sigma: NonNegative = 0.0
    """Of a log-normal: the standard deviation of the logarithm."""
    most: PositiveFloat | None = None
    """At which a log-normal is cut."""
    values: list[NonNegative] | None = None
    """Quantiles, from the least to the greatest, as many as one likes."""
    recorded: str | None = None
    """A run that has ended, by name or folder, whose own figures are taken."""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"constant": value} if isinstance(value, int | float) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _one(self) -> Distribution:
        kinds = {"constant": self.constant, "median": self.median, "values": self.values, "recorded": self.recorded}
        if sum(value is not None for value in kinds.values()) != 1 or self.values == []:
            msg = f"a distribution is a number or a table with one of {', '.join(kinds)}"
            raise ValueError(msg)
        return self


NOTHING = Distribution(constant=0.0)


class GenerationSection(Section):
    """[simulate.generation]: a token takes `token_seconds` x (1 + `load` x samples that run on its device)."""

    tokens: Distribution = Distribution(constant=1.0)
    """Tokens of a sample."""
    token_seconds: PositiveFloat | None = None
    """Of one token; fitted if not set and there is a [simulate.calibration]."""
    load: NonNegative = 0.0
    """By which share of `token_seconds` each running sample slows its device down."""
    row: Distribution | None = None
    """Seconds of a row, instead of all of the above; does not depend on devices."""


class TrainingSection(Section):
    """[simulate.training]: a step takes `device_seconds` / devices + `fixed`."""

    device_seconds: PositiveFloat | None = None
    """Of a step on one device; fitted if not set and there is a [simulate.calibration]."""
    fixed: NonNegative = 0.0
    """Seconds of a step that more devices do not shorten."""
    step: Distribution | None = None
    """Seconds of a step, instead of the above; does not depend on devices."""


class PhasesSection(Section):
    """[simulate.phases]: seconds of all else."""

    reward: Distribution = NOTHING
    """Of a row."""
    publish: Distribution = NOTHING
    """In which the trainer gives new weights out, and does not train."""
    load: Distribution = NOTHING
    """In which a rollout actor takes new weights, and does not generate."""
    switch: Distribution = NOTHING
    """Of a step, colocated: from generating to training and back."""
    checkpoint: Distribution = NOTHING


class CalibrationSection(Section):
    """[simulate.calibration]: one measured figure and how it divides; fits what the other sections leave out."""

    colocated_seconds: PositiveFloat
    """Of a step, measured, when generation and training take turns on all devices."""
    generation_share: Fraction
    """Of it, in generation."""


class SimulateSection(Section):
    """[simulate]: a cluster, and simulated engines on it."""

    devices: Annotated[int, Field(gt=1)]
    rollout_devices: Positive
    """Devices that generate when devices are not shared; the others train."""
    move: Positive = 1
    """By how many devices the search for the best split goes."""
    placement: Literal["colocated", "separate"] = "separate"
    """Of one run, as by `relax up`; `relax simulate` runs `colocated` and each of `staleness`."""
    staleness: tuple[Annotated[int, Field(ge=0)], ...] = (0, 2)
    """Values of staleness.max to run with separate devices."""
    steps: Positive = 10
    """Steps that are measured, besides those that fill and drain the pipeline."""
    time_scale: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Seconds that a simulated second takes."""
    generation: GenerationSection = GenerationSection()
    training: TrainingSection = TrainingSection()
    phases: PhasesSection = PhasesSection()
    calibration: CalibrationSection | None = None

    @model_validator(mode="after")
    def _split(self) -> SimulateSection:
        if self.rollout_devices >= self.devices:
            msg = f"simulate.rollout_devices = {self.rollout_devices} leaves none of {self.devices} devices to train"
            raise ValueError(msg)
        return self

    def devices_of(self, role: Literal["rollout", "trainer"]) -> int:
        """Devices of a role in this placement."""
        if self.placement == "colocated":
            return self.devices
        return self.rollout_devices if role == "rollout" else self.devices - self.rollout_devices
