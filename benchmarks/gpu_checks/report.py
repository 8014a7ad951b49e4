"""Report of the GPU check: `gpu-check.json`, and a Markdown table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_checks.frame import CHECKS, Outcome


def write(outcomes: Sequence[Outcome], folder: Path, seconds: float) -> None:
    """Write `gpu-check.json` and `gpu-check.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-check.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    (folder / "gpu-check.md").write_text(markdown(outcomes, seconds))


def markdown(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return the report."""
    lines = ["# GPU check", "", f"{summary(outcomes)}, in {seconds:.0f} s.", ""]
    lines += ["| check | result | s | figures |", "| --- | --- | --- | --- |"]
    for one in outcomes:
        figures = ", ".join(f"{name.replace('_', ' ')} {shown(value)}" for name, value in one.figures.items())
        told = figures or one.reason.split("\n", 1)[0]
        lines.append(f"| {CHECKS[one.check].about} (`{one.check}`) | {one.result} | {one.seconds:.0f} | {told} |")
    for one in outcomes:
        if one.result == "fail":
            lines += ["", f"## `{one.check}` failed", "", "```", one.reason, "```"]
    return "\n".join(lines) + "\n"


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the numbers of outcomes, such as "12 pass, 1 fail, 3 skipped"."""
    counts = Counter(outcome.result for outcome in outcomes)
    return ", ".join(f"{counts[result]} {result}" for result in ("pass", "fail", "skipped"))


def shown(value: Any) -> str:
    """Return a figure for people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
