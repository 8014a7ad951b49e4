"""Facts of an algorithm function, stated beside it by a decorator.

    @AdvantageSpec(needs=("values",), formula="r - V", latex="r_i - V_i")
    def centred(group: Group, *, gamma: float = 1.0) -> Array: ...

The settings that a function reads are its keyword-only parameters. Modules of built-in functions do not import torch
when they are imported, so commands that train nothing read all facts, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Self, TypeVar, get_args

from relax_actors.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound="FunctionSpec")
INPUTS = ("tokens", "values", "logprobs", "squares", "greedy", "components", "role")
"""Inputs that an estimator can need besides the rewards."""
EqualRewards = Literal["zero", "signal", ""]
FormulaRatio = Literal["setting", "rollout", "sequence_product", "none", ""]
OverSample = Literal["sum", "mean", ""]
Head = Literal["tokens", "scores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """Facts of an algorithm function; a decorator that sets its attribute `spec`."""

    formula: str = ""
    """Its formula as plain text, in the notation of `formulas`."""
    latex: str = ""
    """Its formula as LaTeX."""

    def __new__(cls, *functions: object, **_facts: object) -> Self:
        """Refuse a function in place of facts, as the decorator without parentheses is called."""
        if functions:
            msg = f"write @{cls.__name__}(...), with parentheses and with facts by name"
            raise TypeError(msg)
        return object.__new__(cls)

    def __call__(self, function: F) -> F:
        """Attach the facts to a function."""
        function.spec = self  # type: ignore[attr-defined]
        return function

    @property
    def further_settings(self) -> frozenset[str]:
        """Settings of [algorithm] that are read for the function outside of it."""
        return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSpec(FunctionSpec):
    """Facts of an advantage estimator; raises ValueError for unknown values."""

    needs: tuple[str, ...] = ()
    """Of `INPUTS`; the fields of `Group` that must not be None. "tokens" are `lengths` and `loss_mask`."""
    min_samples: int = 1
    """Smallest group that can have an advantage other than 0."""
    per_token: bool = False
    """Whether token rewards give advantages of tokens. The KL in the reward is then a reward of single tokens; else it
    is summed into the reward of the sample."""
    by_turn: bool = False
    """Whether the turns of a sample have baselines or advantages of their own: it reads `Group.turn_numbers`."""
    equal_rewards: EqualRewards = ""
    """Advantages where all samples of a row have the same reward: always 0, or a signal; empty if that depends on other
    numbers."""
    running_mean: bool = False
    """Whether the trainer subtracts the running mean reward of the samples' role, which is state across steps."""
    needs_positive: bool = False
    """Whether rewards must not be negative; `relax check` refuses settings that make them so."""
    unscaled: str = ""
    """Algorithm and paper whose advantages no standard deviation divides; empty if one may."""
    plain_gradient: str = ""
    """Paper that derives it for the plain policy gradient, without KL and entropy bonus."""

    def __post_init__(self) -> None:
        if isinstance(self.needs, str):
            msg = f'needs = {self.needs!r} is no tuple; write needs=("{self.needs}",)'
            raise ValueError(msg)  # noqa: TRY004 a wrong value of a fact, like those below
        if unknown := set(self.needs) - set(INPUTS):
            msg = f"{', '.join(sorted(unknown))} cannot be needed by an estimator; choose of {', '.join(INPUTS)}"
            raise ValueError(msg)
        _check_choice("equal_rewards", self.equal_rewards, EqualRewards)

    @property
    def further_settings(self) -> frozenset[str]:
        """Settings of [algorithm] that are read for the function outside of it."""
        return frozenset({"ema_decay"} if self.running_mean else {"critic_lambda"} if "values" in self.needs else ())

    @property
    def compares_samples(self) -> bool:
        """Whether the rewards of whole samples are compared with each other."""
        return self.equal_rewards == "zero" and not self.per_token

    @property
    def has_sample_baseline(self) -> bool:
        """Whether all turns of a sample have one baseline."""
        return self.compares_samples or self.running_mean or "greedy" in self.needs


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec(FunctionSpec):
    """Facts of a policy loss; raises ValueError for unknown values."""

    ratio: FormulaRatio = ""
    """Ratio R of its formula: that of `algorithm.ratio`; of each token to the rollout; of the whole sample; or none, so
    that data of older weights need a correction. Empty if it is not known, or computed by the function."""
    rows: str | tuple[str, ...] = "sampled"
    """Rows that it is a loss of, one or several values of `algorithm.rows`."""
    head: Head = "tokens"
    """What the model computes that it is a loss of, a value of `algorithm.head`: with "scores" it reads
    `PolicyInputs.scores` and `PolicyInputs.targets`."""
    whole_step: bool = False
    """Whether it reads `PolicyInputs.step_sum`: its backward pass starts when all rows of the step are there."""
    over_sample: OverSample = ""
    """How a token's loss depends on all tokens of its sample, whatever `algorithm.ratio` is: by sums, by a mean, or not
    at all. With `algorithm.entropy.quantile` a mean is over the tokens of the highest entropies."""
    over_row: bool = False
    """Whether it reads `PolicyInputs.row_sum`: a token's loss depends on all samples of its row."""
    clips_ratio: bool = False
    """Whether `clip_low` and `clip_high` are distances of R from 1."""
    choose: Callable[..., Any] | None = None
    """Function that chooses tokens of the whole step, `[tokens] bool`, from the arrays `advantages`, `logprobs` and
    `ratio` of all tokens, the `seed` of the step and settings, as far as it has parameters of these names."""

    def __post_init__(self) -> None:
        _check_choice("ratio", self.ratio, FormulaRatio)
        _check_choice("head", self.head, Head)
        _check_choice("over_sample", self.over_sample, OverSample)

    @property
    def kinds_of_rows(self) -> tuple[str, ...]:
        """Values of `algorithm.rows` that it is a loss of."""
        return (self.rows,) if isinstance(self.rows, str) else self.rows

    @property
    def needs_whole_step(self) -> bool:
        """Whether its backward pass starts when all rows of the step are there."""
        return self.whole_step or self.choose is not None

    @property
    def further_settings(self) -> frozenset[str]:
        """Settings of [algorithm] that are read for the function outside of it."""
        chosen = frozenset() if self.choose is None else frozenset(keyword_only(self.choose)) - {"seed"}
        return chosen | ({"ratio"} if self.ratio == "setting" else set())


def _check_choice(name: str, value: str, choices: Any) -> None:
    """Raise ValueError unless the value of a fact is one of a `Literal`."""
    known = get_args(choices)
    if value not in known:
        msg = f"{name} = {value!r} is not known; choose of {', '.join(map(repr, known))}"
        raise ValueError(msg)


def keyword_only(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of a function by name."""
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def settings_accepted(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Select a function's keyword-only settings; `**settings` gets none."""
    return {name: settings[name] for name in keyword_only(function) if name in settings}


@cache
def settings_read(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the settings that are read for a built-in function, in it or outside of it."""
    spec: FunctionSpec = function.spec  # type: ignore[attr-defined]
    return frozenset(keyword_only(function)) | spec.further_settings


def advantage_spec(function: Callable[..., Any]) -> AdvantageSpec:
    """Return an estimator's facts, by default rewards alone; raises ConfigError."""
    return _spec(function, AdvantageSpec)


def loss_spec(function: Callable[..., Any]) -> LossSpec:
    """Return a policy loss's facts, by default unknown; raises ConfigError."""
    return _spec(function, LossSpec)


def _spec(function: Callable[..., Any], kind: type[S]) -> S:
    spec = getattr(function, "spec", None)
    if spec is None:
        return kind()
    if not isinstance(spec, kind):
        name, other = getattr(function, "__name__", function), type(spec).__name__
        msg = f"attribute spec of {name} is of type {other}; decorate the function with @{kind.__name__}(...) instead"
        raise ConfigError(msg)
    return spec
