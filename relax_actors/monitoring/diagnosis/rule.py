"""What a rule of `relax doctor` is: a pure function from observations to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from relax_actors.monitoring.diagnosis.observations import Observations
from relax_actors.monitoring.finding import Finding

Check = Callable[[Observations], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """Facts about a rule.

    Attributes:
        what: what it finds, in one line.
        source: where the failure was published, if it was; empty otherwise.
    """

    what: str
    source: str = ""


class Rule(Protocol):
    """A function with a spec."""

    spec: RuleSpec

    def __call__(self, seen: Observations) -> Iterator[Finding]:
        """Yield what is wrong with a run; nothing if healthy, or without the figures."""


def rule(what: str, source: str = "") -> Callable[[Check], Check]:
    """Make a function a rule, whose name is the name of the function."""

    def mark(function: Check) -> Check:
        function.spec = RuleSpec(what, source)  # type: ignore[attr-defined]
        return function

    return mark
