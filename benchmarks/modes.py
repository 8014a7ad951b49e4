"""Measure speed, idle time and reward of one configuration from on-policy to asynchronous.

    python benchmarks/modes.py [--steps 200] [--seeds 1 2 3] [--json]

Runs `benchmarks/modes.toml` with `relax up` for each seed, interleaved: colocated (`staleness.max = 0`; rollout and
trainer compute alternately, so one of two cores is idle, as one of two devices would be) and separate with
`staleness.max` 0, 1 and 4.

Steps per hour are counted from the end of step `--warm-up` to the end of the last step but one. The trainer is idle
while it waits for rows. The last reward is the mean over the last fifth of the steps, of 128 samples each. "To half" is
the time from the warm-up until the mean of ten steps has covered half of the distance to the best last reward. Exit
code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.recorded import read_metrics

CONFIG = Path(__file__).with_name("modes.toml")
MODES = {
    "colocated": ["staleness.max=0", 'placement.colocate=[["rollout","trainer"]]'],
    "separate, max 0": ["staleness.max=0"],
    "separate, max 1": ["staleness.max=1"],
    "separate, max 4": ["staleness.max=4"],
}
GOAL = 1.5
RUN_SECONDS = 900.0
WINDOW = 10


@dataclass(frozen=True)
class Curve:
    """Steps of one run after the warm-up: end (Unix seconds), reward, wait of the trainer in seconds, staleness."""

    times: list[float]
    rewards: list[float]
    waited: list[float]
    staleness: list[float]

    @property
    def seconds(self) -> float:
        """Time from the end of the first step to the end of the last."""
        return self.times[-1] - self.times[0]

    @property
    def steps_per_hour(self) -> float:
        """Optimizer steps per hour."""
        return 3600 * (len(self.times) - 1) / self.seconds

    @property
    def idle(self) -> float:
        """Share of the time in which the trainer waited for rows."""
        return sum(self.waited[1:]) / self.seconds

    @property
    def last(self) -> float:
        """Mean reward of the last fifth of the steps."""
        return statistics.mean(self.rewards[-max(1, len(self.rewards) // 5) :])

    def until(self, reward: float) -> float | None:
        """Seconds until the mean of ten steps reached `reward`; None if it never did."""
        means = np.convolve(self.rewards, np.full(WINDOW, 1 / WINDOW), "valid")
        reached = np.flatnonzero(means >= reward)
        return self.times[int(reached[0]) + WINDOW - 1] - self.times[0] if len(reached) else None


def run(folder: Path, mode: str, seed: int, steps: int, warm_up: int) -> Curve:
    """Train once and return the steps after the warm-up."""
    name = f"{mode.replace(', ', '-').replace(' ', '')}-{seed}"
    settings = [f"run.name={name}", f"run.seed={seed}", f"run.steps={steps}", *MODES[mode]]
    command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(CONFIG), "--quiet", *settings]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=RUN_SECONDS)
    with connected(str(folder / "runs" / name)) as at:
        bodies = sorted(read_metrics(at.table, "trainer", "step"), key=lambda body: body["step"])
    if [body["step"] for body in bodies] != list(range(steps)):
        sys.exit(f"{name}: got metrics of {len(bodies)} of {steps} steps")
    counted = bodies[warm_up:-1]
    columns = ("time", "reward", "waited_seconds", "staleness_mean")
    return Curve(*([float(body[column]) for body in counted] for column in columns))


def spread(values: list[float], form: str) -> str:
    """Format median, minimum and maximum."""
    if len(values) == 1:
        return format(values[0], form)
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def report(curves: dict[str, list[Curve]], console: Console) -> dict[str, Any]:
    """Print the table and return its figures."""
    table = Table(title="medians (lowest to highest) over the seeds")
    for column in ("mode", "steps/h", "ratio", "trainer idle", "staleness", "reward, start", "last", "seconds to half"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    first = next(iter(curves))
    start = statistics.mean(statistics.mean(c.rewards[:WINDOW]) for runs in curves.values() for c in runs)
    best = max(statistics.median(c.last for c in runs) for runs in curves.values())
    half = (start + best) / 2
    figures: dict[str, Any] = {}
    for mode, runs in curves.items():
        ratios = [c.steps_per_hour / base.steps_per_hour for c, base in zip(runs, curves[first], strict=True)]
        reached = [seconds for c in runs if (seconds := c.until(half)) is not None]
        figures[mode] = {
            "steps_per_hour": round(statistics.median(c.steps_per_hour for c in runs), 1),
            "ratio": round(statistics.median(ratios), 3),
            "idle": round(statistics.median(c.idle for c in runs), 4),
            "last": [round(c.last, 4) for c in runs],
            "half_seconds": [round(seconds, 1) for seconds in reached],
        }
        table.add_row(
            mode,
            spread([c.steps_per_hour for c in runs], ".0f"),
            spread(ratios, ".2f"),
            spread([c.idle for c in runs], ".1%"),
            spread([statistics.mean(c.staleness) for c in runs], ".2f"),
            spread([statistics.mean(c.rewards[:WINDOW]) for c in runs], ".3f"),
            spread([c.last for c in runs], ".3f"),
            spread(reached, ".0f") if len(reached) == len(runs) else "never",
        )
    console.print(table)
    return figures


def missed(figures: dict[str, Any]) -> list[str]:
    """Describe the goals that were missed."""
    found = []
    fastest = max(figure["ratio"] for figure in figures.values())
    if fastest < GOAL:
        found.append(f"asynchronous training is {fastest:.2f} times as fast as colocated; the goal is {GOAL}")
    lasts = {mode: figure["last"] for mode, figure in figures.items()}
    on_policy = lasts["separate, max 0"] + lasts["colocated"]
    for mode, values in lasts.items():
        # The accepted range is that of the on-policy runs, extended by half of its width on either side.
        room = (max(on_policy) - min(on_policy)) / 2
        if not min(on_policy) - room <= statistics.median(values) <= max(on_policy) + room:
            found.append(f"{mode} ends with reward {statistics.median(values):.3f}, on-policy runs with {on_policy}")
    return found


def main() -> None:
    """Run all modes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    console = Console(stderr=options.json, width=None if sys.stdout.isatty() else 130)
    curves: dict[str, list[Curve]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="modes-") as scratch:
        for seed in options.seeds:
            for mode, runs in curves.items():
                runs.append(run(Path(scratch), mode, seed, options.steps, options.warm_up))
                console.print(f"seed {seed}, {mode}: {runs[-1].steps_per_hour:.0f} steps/h, last {runs[-1].last:.3f}")
    figures = report(curves, console)
    failures = missed(figures)
    for text in failures:
        console.print(text, style="red")
    if options.json:
        sys.stdout.write(json.dumps({"modes": figures, "missed": failures}) + "\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
