"""The keys of a data source, and of a mixture of several: [data], [eval.data] and [data.mixture.<name>]."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from relax_actors.config.sections import Named, NonNegative, NonNegativeInt, Positive, Section
from relax_actors.registry.catalog import DATA_SOURCES

MIXTURE = "mixture"
"""Kind of a source that mixes others."""
TRACES = "traces"
"""Kind of a source of recorded samples."""
FINEST = 10_000
"""Weights are multiples of 1 / FINEST, so that the order of sources repeats after at most so many rows."""


class SourceSection(Section):
    """Keys of a data source."""

    kind: Annotated[str, Named(DATA_SOURCES)]
    """Format or generator of the rows: `jsonl`, `parquet` and `arrow` (both need the extra `parquet`), `reasoning_gym`
    (needs the extra `tasks`), `python` for a function, `traces` for recorded samples, `mixture` of several sources, or
    a data source of another package."""
    path: Path | None = None
    """File, folder or pattern such as `data/*.jsonl` of a source of files. Files of a folder are read in the order of
    their names."""
    split: str | None = None
    """Split of a folder, by the names of its files and folders, such as `train`. A folder with files of several splits
    needs it."""
    task: str | None = None
    """Name of a reasoning-gym task."""
    function: str | None = None
    """Dotted path of the function of a `python` source, in a module beside the TOML file or an installed package. It is
    called with `size`, `seed` and `options` and returns a sequence of tasks."""
    size: Positive | None = None
    """Number of tasks to use or to generate; all tasks of a file, or the generator's default, if not set."""
    rows: str | None = None
    """Slice of the rows by numbers or shares: `"0:1000"`, `"-200:"`, `"0%:90%"`."""
    seed: NonNegativeInt = 0
    """Seed of a generator or function."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a reasoning-gym task, of a function, or of a source of another package."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Names in the file of `prompt`, `messages`, `answer`, `images`, `videos`, `audios`, `category`, `chosen`,
    `rejected`, `label`, `tools`, or of another field that a reward reads; dots lead into nested fields, as in
    `answer = "solution.final"`. All other fields keep their names."""


class PartSection(SourceSection):
    """[data.mixture.<name>]: a source of a mixture."""

    weight: NonNegative | None = None
    """Share of the rows, a multiple of 0.0001; the weights of a mixture add up to 1. Without any weights all sources
    are one data set, whose rows come once an epoch."""


class CurriculumSection(Section):
    """[[data.curriculum]]: weights of a mixture from a step on."""

    step: Positive
    """First step with these weights."""
    weights: dict[str, NonNegative]
    """Weight of each source by name; a source that is left out has none."""


class MixedSection(SourceSection):
    """Keys of a source that may be a mixture."""

    mixture: dict[str, PartSection] = Field(default_factory=dict)
    """Sources of a mixture by name."""
    curriculum: tuple[CurriculumSection, ...] = ()
    """Other weights of a mixture from given steps on."""

    @property
    def has_traces(self) -> bool:
        """Whether the source, or one of a mixture, holds recorded samples."""
        return TRACES in {self.kind, *(part.kind for part in self.mixture.values())}

    @field_validator("mixture")
    @classmethod
    def _weighted(cls, value: dict[str, PartSection]) -> dict[str, PartSection]:
        weights = {name: part.weight for name, part in value.items() if part.weight is not None}
        if weights:
            if lacking := [name for name in value if name not in weights]:
                msg = f"{lacking[0]} has no weight, and {next(iter(weights))} has one; give all of them one, or none"
                raise ValueError(msg)
            exact_weights(weights)
        for name, part in value.items():
            if part.kind == MIXTURE:
                msg = f"{name} is a mixture in a mixture; list its sources beside the others"
                raise ValueError(msg)
        return value

    @model_validator(mode="after")
    def _mixed(self) -> MixedSection:
        if (self.kind == MIXTURE) != bool(self.mixture):
            msg = (
                f'kind = "{MIXTURE}" and sources [data.mixture.<name>] belong together, for example:\n'
                '  [data]\n  kind = "mixture"\n  [data.mixture.math]\n  kind = "jsonl"\n  path = "math.jsonl"\n'
                "  weight = 0.7\n  [data.mixture.code]\n  ..."
            )
            raise ValueError(msg)
        other = next((name for name, part in self.mixture.items() if part.kind != TRACES), None)
        if self.has_traces and other is not None:
            msg = (
                f'mixture.{other} has kind = "{self.mixture[other].kind}" beside "{TRACES}"; samples are '
                "recorded in all sources of a run or in none"
            )
            raise ValueError(msg)
        own = changed(self, SourceSection.model_fields.keys() - {"kind"})
        if self.mixture and own:
            msg = f"{min(own)} belongs to a source of the mixture; set it in [data.mixture.<name>]"
            raise ValueError(msg)
        self._check_curriculum()
        return self

    def _check_curriculum(self) -> None:
        if self.curriculum and not any(part.weight is not None for part in self.mixture.values()):
            msg = "curriculum changes the weights of a mixture; give its sources the weights of step 0"
            raise ValueError(msg)
        steps = [stage.step for stage in self.curriculum]
        if steps != sorted(set(steps)):
            msg = f"curriculum: its steps are {steps}; write them in ascending order"
            raise ValueError(msg)
        for stage in self.curriculum:
            for name in stage.weights:
                if name not in self.mixture:
                    close = difflib.get_close_matches(name, self.mixture, 1)
                    hint = f"did you mean {close[0]!r}?" if close else f"sources: {', '.join(self.mixture)}"
                    msg = f"curriculum of step {stage.step}: no source of the mixture is named {name!r}; {hint}"
                    raise ValueError(msg)
            exact_weights(stage.weights, f"curriculum of step {stage.step}: ")


def changed(section: Section, names: Iterable[str]) -> set[str]:
    """Return which keys of a section have other values than by default; a saved configuration sets all of them."""
    fields = type(section).model_fields
    return {name for name in names if getattr(section, name) != fields[name].get_default(call_default_factory=True)}


def exact_weights(weights: Mapping[str, float], where: str = "") -> dict[str, Fraction]:
    """Return weights as the decimals that were written.

    Raises:
        ValueError: they do not add up to 1, or one has more than four decimals.
    """
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    if fine := [name for name, weight in exact.items() if FINEST % weight.denominator]:
        msg = f"{where}weight {weights[fine[0]]} of {fine[0]} has more than four decimals; round it"
        raise ValueError(msg)
    total = sum(exact.values())
    if total != 1:
        msg = f"{where}the weights add up to {float(total):g}, not to 1; {_remedy(exact.values(), total)}"
        raise ValueError(msg)
    return exact


def _remedy(weights: Iterable[Fraction], total: Fraction | int) -> str:
    if not total:
        return "give at least one source a weight"
    parts = [int(weight * FINEST / total) for weight in weights]
    parts[0] += FINEST - sum(parts)
    return f"for the same shares write {', '.join(f'{part / FINEST:g}' for part in parts)}"
