"""Diagnosis of a run: rules over its figures and events.

A rule is a function with the decorator `rule` in one of the modules of `RULES`. Another distribution adds one by an
entry point of the group `relax_actors.rules`:

    [project.entry-points."relax_actors.rules"]
    my_rule = "my_package.rules:my_rule"
"""

from __future__ import annotations

from dataclasses import replace

from relax_actors.monitoring.diagnosis.observations import Event, Observations, Reading
from relax_actors.monitoring.diagnosis.rule import Rule, RuleSpec, rule
from relax_actors.monitoring.finding import Evidence, Finding
from relax_actors.printable import printable
from relax_actors.registry import Registry

RULES: Registry[Rule] = Registry(
    "rule",
    "relax_actors.rules",
    modules=[
        f"relax_actors.monitoring.diagnosis.rules.{name}"
        for name in (
            "processes",
            "throughput",
            "rewards",
            "samples",
            "mismatch",
            "optimizer",
            "evaluation",
            "resources",
        )
    ],
    attributes=("spec",),
)


def diagnose(seen: Observations) -> list[Finding]:
    """Apply all rules; the problems come first."""
    findings = [finding for name in RULES.names() for finding in _apply(name, seen)]
    return sorted(findings, key=lambda finding: not finding.is_problem)


def _apply(name: str, seen: Observations) -> list[Finding]:
    """Apply a rule; one that fails becomes a note, so that the other rules are still heard."""
    try:
        return [replace(finding, rule=name) for finding in RULES.load(name, "rule")(seen)]
    except Exception as error:  # noqa: BLE001 a rule may belong to another distribution
        text = printable(f"{type(error).__name__}: {error}"[:300])
        return [
            Finding(
                f"rule {name} failed: {text}",
                is_problem=False,
                rule=name,
                remedy="correct the rule; the other rules were applied",
            )
        ]


__all__ = ["RULES", "Event", "Evidence", "Finding", "Observations", "Reading", "Rule", "RuleSpec", "diagnose", "rule"]
