"""Live view of a run on a terminal."""

from __future__ import annotations

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax_actors.counted import counted
from relax_actors.monitoring.progress import Progress

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 100
"""Columns of the view; fewer on a narrower terminal."""
BAR, CURVE = 20, 48
"""Columns of the bar of steps and of the curve, with which both lines fit in 80 columns."""
MAX_SHOWN = 5
LABELS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "kl": "KL to the first weights",
    "k3": "KL to the sampling weights",
    "clipped": "clipped tokens",
}
"""Names of the figures of a step that are shown."""


class LiveView:
    """Draws the state of a run; every drawing shows its state at that moment."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __rich__(self) -> Panel:
        """Draw the state."""
        p = self._progress
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        grid.add_row("steps", _steps(p))
        curve = [value for _, value in p.curve]
        grid.add_row(f"mean {p.figure}", f"{sparkline(curve, CURVE)} {p.value:.3f}" if curve else "none yet")
        if p.evals:
            shown = sorted(p.evals.items())[-MAX_SHOWN:]
            grid.add_row("held-out", "  ".join(f"version {version}: {value:.3f}" for version, value in shown))
        count = p.ledger.get
        ends = ("trained", "in_flight", "dropped", "quarantined")
        grid.add_row("rows", ", ".join(f"{name.replace('_', ' ')} {count(name, 0)}" for name in ends))
        if p.training:
            figures = (f"{label} {p.training[name]}" for name, label in LABELS.items() if name in p.training)
            grid.add_row("last step", ", ".join(figures))
        age, lead = _distance(p.batch.get("staleness", 0)), _distance(count("lead", 0))
        grid.add_row("samples", f"sampled by weights up to {age} old; generation is up to {lead} ahead of training")
        worst = sorted(p.restarted.items(), key=lambda entry: -entry[1])[:MAX_SHOWN]
        names = ": " + ", ".join(f"{name} {n}" for name, n in worst) if worst else ""
        grid.add_row("actors", Text(f"{p.alive} up, {counted(p.restarts, 'restart')}{names}"))
        if failures := p.failures.lines()[-MAX_SHOWN:]:
            grid.add_row("failures", Text("\n".join(failures), style="red"))
        if waits := p.waits_for:
            grid.add_row("waiting", Text(waits, style="yellow"))
        events = Text("\n".join(p.events), style="dim")
        return Panel(Group(grid, events), title=f"relax {p.run}", width=WIDTH)


def _distance(steps: object) -> str:
    """Return a number of steps as an actor reported it, as words."""
    return f"{steps} step" if str(steps) == "1" else f"{steps} steps"


def _steps(p: Progress) -> Table:
    left, rate = p.seconds_left, f"{p.steps_per_second:.1f} steps/s"
    time_left = "time left unknown" if left is None else f"{left:.0f} s left"
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=p.steps or None, completed=p.step, width=BAR)
    grid.add_row(bar, f"{p.step} of {p.steps or '?'}, {rate}, {time_left}")
    return grid


def sparkline(values: list[float], width: int) -> str:
    """Draw values as at most `width` bars, scaled between their minimum and maximum."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for i in range(0, len(values), size) if (part := values[i : i + size])]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in means)
