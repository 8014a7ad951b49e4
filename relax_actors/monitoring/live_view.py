"""Live view of a run, built from its events and metrics."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax_actors.monitoring.render import printable

BARS = "▁▂▃▄▅▆▇█"
SILENT_SECONDS = 5.0
MAX_ACTORS = 4096
MAX_STEPS = 10**9
MAX_SHOWN = 5
TRAINING = ("loss", "kl", "k3", "grad_norm", "clipped")
ROWS = ("in_flight", "trained", "dropped", "quarantined")
SHOWN_EVENTS = (
    "fault",
    "waiting_for_room",
    "crashed",
    "down",
    "repaired",
    "waiting_for_import",
    "row_quarantined",
    "row_dropped",
    "row_failed",
    "gave_up",
    "replay_diverged",
    "evaluated",
)


@dataclass(slots=True)
class Progress:
    """State of a run as its log reports it; feed every message to `take`.

    Any client of the broker can write to the log: malformed messages are ignored, and the state is bounded.

    Attributes:
        run: name of the run.
        steps: its last step; 0 while unknown.
        step: number of optimizer steps done.
        reward: mean reward of the last step.
        finished: whether the run reported its end.
        notice: what the whole run waits for; empty if nothing.
    """

    run: str
    steps: int
    step: int = 0
    reward: float = 0.0
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=2000))
    batch: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    last_seen: dict[str, float] = field(default_factory=dict)
    restarted: dict[str, int] = field(default_factory=dict)
    evals: dict[int, float] = field(default_factory=dict)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=5))
    finished: bool = False
    training: dict[str, str] = field(default_factory=dict)
    notice: str = ""
    step_times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=200))

    def take(self, subject: str, data: bytes) -> None:
        """Update the state by an event or a metric; ignore a malformed one.

        Args:
            subject: `relax.<run>.event.>` or `relax.<run>.metric.>`.
            data: JSON object.
        """
        tokens = subject.split(".")
        try:
            body = json.loads(data)
            if not isinstance(body, dict) or len(tokens) < 5:  # noqa: PLR2004 relax.<run>.<kind>.<role>.<n>
                return
            if tokens[2] == "event" and tokens[-1] == body.get("kind"):
                self._event(body)
            elif tokens[2] == "metric" and len(self.last_seen) < MAX_ACTORS:
                self._metric(body)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return

    def _event(self, body: dict[str, Any]) -> None:
        kind = body["kind"]
        if kind == "finished":
            self.finished = True
        if kind == "restarted" and len(self.restarted) < MAX_ACTORS:
            self.restarted[_name(body)] = self.restarted.get(_name(body), 0) + 1
        if kind == "evaluated":
            self._evaluated(body["version"], body["reward"])
        if kind in SHOWN_EVENTS:
            text = str(body.get("reason") or body.get("error") or body.get("reward") or body.get("seconds") or "")
            what = body.get("row") or body.get("version", "")
            line = f"{body.get('role')}.{body.get('n')} {kind} {what} {text}".split("\n", 1)[0][:110]
            self.events.append(printable(line))

    def _evaluated(self, version: Any, reward: Any) -> None:
        if 0 <= int(version) <= (self.steps or MAX_STEPS):
            self.evals[int(version)] = _finite(reward)

    def _metric(self, body: dict[str, Any]) -> None:
        if body.get("kind") == "run":
            self.steps = max(0, min(int(body["steps"]), MAX_STEPS))
            return
        if body.get("kind") == "step":
            step, reward, at = int(body["step"]), _finite(body["reward"]), _finite(body["time"])
            if 0 <= step < (self.steps or MAX_STEPS):
                self.step, self.reward = step + 1, reward
                self.rewards.append(reward)
                self.batch = {name: _short(body.get(name, 0)) for name in ("staleness", "span")}
                self.training = {name: f"{_finite(body[name]):.4g}" for name in TRAINING if name in body}
                self.step_times.append((at, self.step))
            return
        self.last_seen[_name(body)] = time.monotonic()
        if body.get("role") == "prompts":
            self.ledger = {name: _short(body.get(name, 0)) for name in (*ROWS, "lead")}
        if "eval_version" in body:
            self._evaluated(body["eval_version"], body["eval_reward"])

    @property
    def alive(self) -> int:
        """Number of actors that published a metric in the last `SILENT_SECONDS`."""
        now = time.monotonic()
        return sum(now - at < SILENT_SECONDS for at in self.last_seen.values())

    @property
    def restarts(self) -> int:
        """Number of restarts of all actors."""
        return sum(self.restarted.values())

    @property
    def steps_per_second(self) -> float:
        """Optimizer steps a second over the last 200 steps; 0 while unknown."""
        if len(self.step_times) < 2:  # noqa: PLR2004
            return 0.0
        (first, a), (last, b) = self.step_times[0], self.step_times[-1]
        return (b - a) / max(last - first, 1e-6)

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the last step at the present rate; None while unknown."""
        rate = self.steps_per_second
        return (self.steps - self.step) / rate if rate > 0 and self.steps else None

    def line(self) -> str:
        """Format the state as one plain line, for output that is no terminal."""
        left = self.seconds_left
        return (
            f"step {self.step}/{self.steps or '?'} reward {self.reward:.3f} "
            f"in_flight {self.ledger.get('in_flight', 0)} staleness {self.batch.get('staleness', 0)} "
            f"actors {self.alive} restarts {self.restarts} "
            f"left {'?' if left is None else f'{left:.0f} s'}" + (f"; waiting: {self.notice}" if self.notice else "")
        )

    def __rich__(self) -> Panel:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        left = self.seconds_left
        rate = f"{self.steps_per_second:.1f} steps/s"
        time_left = "?" if left is None else f"{left:.0f} s left"
        bar = ProgressBar(total=self.steps or None, completed=self.step, width=40)
        steps = Table.grid(padding=(0, 1))
        steps.add_row(bar, f"{self.step} of {self.steps or '?'}, {rate}, {time_left}")
        grid.add_row("step", steps)
        grid.add_row("reward", f"{sparkline(list(self.rewards), 48)} {self.reward:.3f}")
        if self.evals:
            shown = sorted(self.evals.items())[-5:]
            grid.add_row("evaluation", "  ".join(f"v{version}: {value:.3f}" for version, value in shown))
        rows = " ".join(f"{name} {self.ledger.get(name, 0)}" for name in ROWS)
        grid.add_row("rows", rows)
        if self.training:
            grid.add_row("training", "  ".join(f"{name} {value}" for name, value in self.training.items()))
        staleness, span = (self.batch.get(name, 0) for name in ("staleness", "span"))
        grid.add_row("staleness", f"lead {self.ledger.get('lead', 0)}, staleness {staleness}, span {span}")
        worst = sorted(self.restarted.items(), key=lambda entry: -entry[1])[:MAX_SHOWN]
        actors = ": " + ", ".join(f"{printable(actor)} {count}" for actor, count in worst) if worst else ""
        grid.add_row("actors", Text(f"{self.alive} alive, {self.restarts} restarts{actors}"))
        if self.notice:
            grid.add_row("waiting", Text(self.notice, style="yellow"))
        events = Text("\n".join(self.events), style="dim")
        return Panel(Group(grid, events), title=f"relax {self.run}", width=100)


def _name(body: dict[str, Any]) -> str:
    return f"{body.get('role')}.{body.get('n')}"[:80]


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or abs(number) > 1e30:  # noqa: PLR2004 sums and differences stay finite
        msg = f"{number} is out of range"
        raise ValueError(msg)
    return number


def _short(value: Any) -> str:
    return str(value)[:20]


def sparkline(values: list[float], width: int) -> str:
    """Draw values as at most `width` bars, scaled between their minimum and maximum."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for i in range(0, len(values), size) if (part := values[i : i + size])]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in means)
