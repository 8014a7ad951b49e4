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
    findings = [replace(finding, rule=name) for name in RULES.names() for finding in RULES.load(name, "rule")(seen)]
    return sorted(findings, key=lambda finding: not finding.is_problem)


__all__ = ["RULES", "Event", "Evidence", "Finding", "Observations", "Reading", "Rule", "RuleSpec", "diagnose", "rule"]
