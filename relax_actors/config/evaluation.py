"""The section [eval]: sets of held-out prompts, how they are answered, and what their figures count."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import xxhash
from pydantic import Field, field_validator, model_validator

from broker.subjects import RowId, check_name
from relax_actors.config.data import DataSection
from relax_actors.config.sections import MissingKeyError, NonNegativeInt, Positive, Section
from relax_actors.config.sources import changed
from relax_actors.errors import RowError

if TYPE_CHECKING:
    from relax_actors.config.pools import RewardSection, RolloutSection

ONLY_SET = "held_out"
"""Name of the set of a section [eval] without [eval.sets]."""
NOT_OF_SETS = ("every", "sets")
SAMPLING = ("samples", "temperature", "top_p", "max_tokens", "k", "passes", "vote")
"""Settings that only answers of the policy have, not rows that are scored by log-probs."""


class EvalSet(Section):
    """[eval.sets.<name>]: one of several sets of held-out prompts. What it leaves out is as in [eval]."""

    rows: Positive = 64
    """Number of held-out prompts."""
    reward: str | dict[str, float] = "exact_match"
    """Reward of held-out rows, as `reward.function`."""
    samples: Positive = 1
    """Answers to each prompt; more than one needs a `temperature` above 0."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature; 0 answers greedily, by the most likely tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: only the most probable tokens with this total probability are sampled."""
    max_tokens: Positive | None = None
    """Maximum length of an answer in tokens, at most `rollout.max_tokens`, which it is if not set."""
    k: tuple[Positive, ...] | None = None
    """Numbers of answers of pass@k and majority@k, each at most `samples`. By default `samples` and the powers of two
    below it."""
    passes: float = 1.0
    """Least reward of an answer that counts as passed, for accuracy, pass@k and majority@k."""
    vote: Literal["final", "number", "letter"] = "final"
    """What majority@k counts as the answer of a text: the last `<answer>` tag or `\\boxed{}`, else the whole text; its
    last number; or the letter of the choice that it makes."""
    category: str | None = None
    """Field of a row's metadata by whose values the figures are also given."""
    data: DataSection | None = None
    """Source of the held-out prompts, separate from the training data."""

    @field_validator("data")
    @classmethod
    def _in_order(cls, value: DataSection | None) -> DataSection | None:
        if value is None:
            return None
        idle = changed(value, ("stop", "shuffle", "curriculum"))
        idle |= {f"mixture.{name}.weight" for name, part in value.mixture.items() if part.weight is not None}
        if idle:
            msg = (
                f"{min(idle)} has no effect: the first held-out rows are evaluated, of a mixture those of each source "
                "in turn; leave it out"
            )
            raise ValueError(msg)
        return value

    @model_validator(mode="after")
    def _samples(self) -> EvalSet:
        if self.samples > 1 and self.temperature == 0:
            msg = (
                f"samples = {self.samples} with temperature = 0 are {self.samples} equal answers; set a temperature, "
                "such as 1.0, or samples = 1"
            )
            raise ValueError(msg)
        if self.k is not None and (most := max(self.k, default=1)) > self.samples:
            msg = f"k = {most} needs {most} answers to each prompt, but samples = {self.samples}; raise samples"
            raise ValueError(msg)
        return self

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k and majority@k, ascending."""
        if self.k is not None:
            return tuple(sorted(set(self.k)))
        powers = (1 << i for i in range(self.samples.bit_length()))
        return tuple(sorted({*powers, self.samples}))

    @property
    def source(self) -> DataSection:
        """The section of the source, which every set of a valid configuration has."""
        assert self.data is not None  # noqa: S101 `EvalSection` refuses sets without data
        return self.data


class EvalSection(EvalSet):
    """[eval]: held-out prompts, answered before the first step, at intervals, and after the last step. Several sets are
    written as [eval.sets.<name>].
    """

    every: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    sets: dict[str, EvalSet] = Field(default_factory=dict)
    """Sets of held-out prompts by name; without them, [eval] itself is the only one, `held_out`."""

    @model_validator(mode="before")
    @classmethod
    def _inherited(cls, tree: Any) -> Any:
        """Let sets take the settings of [eval] that they leave out."""
        sets = tree.get("sets") if isinstance(tree, dict) else None
        if not isinstance(sets, dict):
            return tree
        common = {name: value for name, value in tree.items() if name not in NOT_OF_SETS}
        return tree | {"sets": {name: common | own if isinstance(own, dict) else own for name, own in sets.items()}}

    @field_validator("sets")
    @classmethod
    def _names(cls, value: dict[str, EvalSet]) -> dict[str, EvalSet]:
        for name in value:
            try:
                check_name(name, "name of a set")
            except Exception as error:
                raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _data(self) -> EvalSection:
        if without := [name for name, each in self.named.items() if each.data is None]:
            raise MissingKeyError(f"sets.{without[0]}.data" if self.sets else "data")
        return self

    @property
    def named(self) -> dict[str, EvalSet]:
        """The sets by name, in the order of their rows."""
        return dict(self.sets) or {ONLY_SET: self}

    @property
    def located(self) -> dict[str, EvalSet]:
        """The sets by the dotted names of their sections."""
        return {f"eval.sets.{name}": each for name, each in self.sets.items()} or {"eval": self}

    @property
    def total_rows(self) -> int:
        """Rows of all sets: the indices of an evaluation's rows lie below it."""
        return sum(each.rows for each in self.named.values())

    def place(self, index: int) -> tuple[str, EvalSet, int]:
        """Return the set of a held-out row, by its index, and its number there; raises RowError if none has it."""
        number = index
        for name, each in self.named.items():
            if number < each.rows:
                return name, each, number
            number -= each.rows
        msg = f"row {index} of an evaluation belongs to no set of [eval], which has {self.total_rows} rows"
        raise RowError(msg)

    def marks(self) -> list[str]:
        """Return what the answers to each row and their rewards depend on, by the row's index.

        A mark names the set, the number of the row in it, and a digest of the settings; files may move.
        """
        marks = []
        for name, each in self.named.items():
            settings = each.model_dump(mode="json", include={"reward", "temperature", "top_p", "max_tokens", "samples"})
            settings["data"] = _without_paths(each.source.model_dump(mode="json"))
            digest = xxhash.xxh3_64_hexdigest(json.dumps(settings, sort_keys=True).encode())
            marks += [f"{name}/{number}/{digest}" for number in range(each.rows)]
        return marks

    def check_lengths(self, most: int) -> None:
        """Check that no set allows longer answers than `rollout.max_tokens`; raises ValueError if one does."""
        for where, each in self.located.items():
            if (each.max_tokens or 0) > most:
                msg = (
                    f"{where}.max_tokens = {each.max_tokens} is more than rollout.max_tokens = {most}, the limit of "
                    "all answers; raise rollout.max_tokens"
                )
                raise ValueError(msg)

    def with_reward(self, name: str) -> EvalSection:
        """Return the section with this reward in the sets that set none."""
        sets = {
            key: each if "reward" in each.model_fields_set else _rewarded(each, name) for key, each in self.sets.items()
        }
        section = self if "reward" in self.model_fields_set else _rewarded(self, name)
        return section.model_copy(update={"sets": sets})


def _without_paths(data: dict[str, Any]) -> dict[str, Any]:
    mixture = {name: {**part, "path": None} for name, part in data["mixture"].items()}
    return {**data, "path": None, "mixture": mixture}


S = TypeVar("S", bound=EvalSet)


def _rewarded(section: S, name: str) -> S:
    return section if "reward" in section.model_fields_set else section.model_copy(update={"reward": name})


class HeldOutRows:
    """The part of a configuration that says how held-out rows are answered and scored."""

    if TYPE_CHECKING:
        eval: EvalSection | None
        rollout: RolloutSection
        reward: RewardSection

    def held_out(self, row: RowId) -> EvalSet | None:
        """Return the settings of a held-out row; None for a training row. Raises RowError if no set has it."""
        return None if row.kind != "eval" or self.eval is None else self.eval.place(row.index)[1]

    @property
    def held_out_sets(self) -> dict[str, EvalSet]:
        """The sets of held-out rows by the dotted names of their sections; empty without [eval]."""
        return {} if self.eval is None else self.eval.located

    @property
    def most_samples(self) -> int:
        """Most samples of a row, held-out rows included."""
        return max([self.rollout.group_size, *(each.samples for each in self.held_out_sets.values())])

    def takes_reported_reward(self, row: RowId) -> bool:
        """Whether a row is scored by what its environment or agent reports."""
        own = self.held_out(row)
        setting = self.reward.function if own is None else own.reward
        return setting == "environment" or (isinstance(setting, dict) and "environment" in setting)
