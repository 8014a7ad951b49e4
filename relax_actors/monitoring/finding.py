"""A finding about a run: what is wrong, how it is known, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where a finding can be checked.

    Attributes:
        subject: subject of the messages, such as `relax.demo.metric.trainer.0`; may have wildcards.
        steps: first and last step that they are about; None for messages that belong to no step.
        figures: the figures that decided, by name.
    """

    subject: str
    steps: tuple[int, int] | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """Return the evidence in one line."""
        where = "" if self.steps is None else f", steps {self.steps[0]} to {self.steps[1]}"
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return f"{self.subject}{where}" + (f": {figures}" if figures else "")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a run, in a sentence.

    Attributes:
        text: what is wrong; with its remedy, unless `remedy` has it.
        is_problem: whether the run is not healthy with it; otherwise it is worth a look.
        rule: name of the rule, such as `starved_trainer`; empty for what is read of the run's processes and streams.
        evidence: where to check it.
        remedy: what to do; empty if `text` says it.
        settings: names of the settings that move it.
    """

    text: str
    is_problem: bool = True
    rule: str = ""
    evidence: tuple[Evidence, ...] = ()
    remedy: str = ""
    settings: tuple[str, ...] = ()

    @property
    def severity(self) -> str:
        """`problem` or `note`."""
        return "problem" if self.is_problem else "note"

    def json(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "text": self.text,
            "remedy": self.remedy,
            "settings": list(self.settings),
            "evidence": [
                {
                    "subject": each.subject,
                    "steps": None if each.steps is None else list(each.steps),
                    "figures": dict(each.figures),
                }
                for each in self.evidence
            ],
        }
