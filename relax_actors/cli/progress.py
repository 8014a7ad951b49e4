"""The live view of a run: what its events and metrics say, shown on a terminal."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
STALE_SECONDS = 5.0
NOTABLE = (
    "fault",
    "waiting_for_room",
    "crashed",
    "row_quarantined",
    "row_dropped",
    "row_failed",
    "gave_up",
    "replay_diverged",
    "evaluated",
)


@dataclass(slots=True)
class Progress:
    """What is known of a run by listening; `take` is fed with messages of the log."""

    run: str
    steps: int
    step: int = 0
    reward: float = 0.0
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=2000))
    figures: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    restarts: int = 0
    evals: dict[int, float] = field(default_factory=dict)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=5))
    notice: str = ""
    """What the whole run waits for, if it does."""
    step_times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=200))

    def take(self, subject: str, data: bytes) -> None:
        """Take a message of `relax.<run>.event.>` or `relax.<run>.metric.>` in."""
        try:
            body: dict[str, Any] = json.loads(data)
            kind = subject.split(".")[2]
        except (ValueError, IndexError):
            return
        if kind == "event":
            self._event(body)
        elif kind == "metric":
            self._metric(body)

    def _event(self, body: dict[str, Any]) -> None:
        kind = body.get("kind", "")
        if kind == "restarted":
            self.restarts += 1
        if kind == "evaluated":
            self.evals[int(body["version"])] = float(body["reward"])
        if kind in NOTABLE:
            text = str(body.get("reason") or body.get("error") or body.get("reward") or "")
            what = body.get("row") or body.get("version", "")
            self.events.append(f"{body.get('role')}.{body.get('n')} {kind} {what} {text}".split("\n", 1)[0][:110])

    def _metric(self, body: dict[str, Any]) -> None:
        if body.get("kind") == "step":
            self.step = int(body["step"]) + 1
            self.reward = float(body["reward"])
            self.rewards.append(self.reward)
            self.figures = body
            self.step_times.append((float(body["time"]), self.step))
            return
        self.seen[f"{body.get('role')}.{body.get('n')}"] = time.monotonic()
        if body.get("role") == "prompts":
            self.ledger = body
        if "eval_version" in body:
            self.evals[int(body["eval_version"])] = float(body["eval_reward"])

    @property
    def alive(self) -> int:
        """Actors heard of lately."""
        now = time.monotonic()
        return sum(now - at < STALE_SECONDS for at in self.seen.values())

    @property
    def steps_per_second(self) -> float:
        """Over the last steps."""
        if len(self.step_times) < 2:  # noqa: PLR2004
            return 0.0
        (first, a), (last, b) = self.step_times[0], self.step_times[-1]
        return (b - a) / max(last - first, 1e-6)

    @property
    def seconds_left(self) -> float | None:
        """At the present pace, None while there is none."""
        pace = self.steps_per_second
        return (self.steps - self.step) / pace if pace > 0 else None

    def line(self) -> str:
        """One plain line, for output that is no terminal."""
        left = self.seconds_left
        return (
            f"step {self.step}/{self.steps} reward {self.reward:.3f} in_flight {self.ledger.get('in_flight', 0)} "
            f"age {self.figures.get('age', 0)} actors {self.alive} restarts {self.restarts} "
            f"left {'?' if left is None else f'{left:.0f} s'}" + (f"; waiting: {self.notice}" if self.notice else "")
        )

    def __rich__(self) -> Panel:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        left = self.seconds_left
        pace = f"{self.steps_per_second:.1f} steps/s"
        time_left = "?" if left is None else f"{left:.0f} s left"
        bar = ProgressBar(total=self.steps, completed=self.step, width=40)
        steps = Table.grid(padding=(0, 1))
        steps.add_row(bar, f"{self.step} of {self.steps}, {pace}, {time_left}")
        grid.add_row("step", steps)
        grid.add_row("reward", f"{sparkline(list(self.rewards), 48)} {self.reward:.3f}")
        if self.evals:
            shown = sorted(self.evals.items())[-5:]
            grid.add_row("held out", "  ".join(f"v{version}: {value:.3f}" for version, value in shown))
        rows = " ".join(f"{k} {self.ledger.get(k, 0)}" for k in ("in_flight", "trained", "dropped", "quarantined"))
        grid.add_row("rows", rows)
        grid.add_row("staleness", f"age {self.figures.get('age', 0)}, span {self.figures.get('span', 0)}")
        grid.add_row("actors", f"{self.alive} alive, {self.restarts} restarts")
        if self.notice:
            grid.add_row("waiting", Text(self.notice, style="yellow"))
        events = Text("\n".join(self.events), style="dim")
        return Panel(Group(grid, events), title=f"relax {self.run}", width=100)


def sparkline(values: list[float], width: int) -> str:
    """Values as a row of bars, averaged down to `width`, between their least and their greatest."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for i in range(0, len(values), size) if (part := values[i : i + size])]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in means)
