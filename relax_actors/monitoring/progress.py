"""State of a run as its events and metrics report it."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from relax_actors.monitoring.failures import FailureCounts, full_table, resuming, sentence
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.printable import printable

SILENT_SECONDS = 5.0
STALL_SECONDS = 15.0
"""How long a report of a full table is shown."""
MAX_ACTORS = 1024
"""Actors of a role that are counted, and supervisors with their children."""
MAX_STEPS = 10**9
TRAINING = ("loss", "grad_norm", "kl", "k3", "clipped")
"""Figures of a step that are kept; an engine reports those that its settings have."""
ROWS = ("in_flight", "trained", "dropped", "quarantined")


@dataclass(slots=True)
class Progress:
    """State of a run as its log reports it; feed every message to `take`.

    Every role can write to the log as itself: malformed messages are ignored, those that claim to be of another are
    counted, and what one role makes the view remember is bounded.

    Attributes:
        run: name of the run.
        steps: its last step; 0 while unknown.
        step: number of optimizer steps done.
        figure: what `value` is: "reward", or "loss" if rows come from data.
        value: mean reward or loss of the last step.
        curve: steps with their mean rewards or losses; a replayed step is in it once.
        supervised: by supervisor, the restarts of its children, as `relax tree` shows them.
        ended_supervisors: restarts that supervisors had counted before they were restarted themselves, by process.
        announced_restarts: restarts by actor as their events say; supervisors report their counts once a second, so at
            the end of a run the last of them are known from their events alone.
        failures: failures of rows and processes.
        finished: whether the run reported its end.
        notice: what the whole run waits for, except for what its events report; empty if nothing.
        stall: when the table was last reported as full, by the monotonic clock, and of what.
        announced: what plain lines of output say at once.
        resuming: how the trainer catches up with the steps of earlier incarnations; empty if it has.
        waits: what the run waits for between two steps, shown if none came for a while.
        moved_at: when the last step came, by the monotonic clock.
    """

    run: str
    steps: int
    step: int = 0
    figure: str = "reward"
    value: float = 0.0
    curve: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=2000))
    batch: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    last_seen: dict[str, float] = field(default_factory=dict)
    supervised: dict[str, dict[str, int]] = field(default_factory=dict)
    ended_supervisors: Counter[str] = field(default_factory=Counter)
    announced_restarts: Counter[str] = field(default_factory=Counter)
    failures: FailureCounts = field(default_factory=FailureCounts)
    evals: dict[int, float] = field(default_factory=dict)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=5))
    crashed: set[str] = field(default_factory=set)
    finished: bool = False
    training: dict[str, str] = field(default_factory=dict)
    notice: str = ""
    stall: tuple[float, str] = (float("-inf"), "")
    announced: deque[str] = field(default_factory=lambda: deque(maxlen=5))
    resuming: str = ""
    waits: str = ""
    moved_at: float = field(default_factory=time.monotonic)
    step_times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=200))

    def take(self, message: LogMessage, *, recent: bool = True) -> None:
        """Update the state by an event or a metric; ignore one with malformed fields.

        A message from before this `relax up`, whose failures are over, is not `recent`.
        """
        try:
            if message.claim:
                self.failures.ignored(message)
            elif message.is_event:
                self._event(message, recent=recent)
            else:
                self._metric(message, recent=recent)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return

    def _event(self, event: LogMessage, *, recent: bool) -> None:
        kind, body = event.kind, event.body
        if kind == "finished":
            self.finished = True
        if kind == "evaluated":
            self._evaluated(body["version"], body["reward"])
        if kind in ("resuming", "recovered") and event.role == "trainer" and recent:
            self.resuming = resuming(body) if kind == "resuming" else ""
            self.announced += [self.resuming] if self.resuming else []
        if kind == "table_full" and recent:
            self.stall = time.monotonic(), printable(f"the table is {full_table(body)}")[:200]
        if recent:
            self.failures.take(event)
            if kind == "restarted" and _has_room(self.announced_restarts, event):
                self.announced_restarts[event.sender] += 1
            if kind == "crashed" and _has_room(self.crashed, event):
                self.crashed.add(event.sender)
            if text := sentence(event) or self._recovery(event):
                self.events.append(text)

    def _recovery(self, event: LogMessage) -> str:
        """Describe the first start of an actor after its crash; empty for other events."""
        if event.kind == "ready" and event.sender in self.crashed:
            self.crashed.discard(event.sender)
            return f"{event.sender} recovered, {_finite(event.body.get('seconds', 0)):.1f} s after its restart"
        return ""

    def _evaluated(self, version: Any, reward: Any) -> None:
        if 0 <= int(version) <= (self.steps or MAX_STEPS):
            self.evals[int(version)] = _finite(reward)

    def _metric(self, message: LogMessage, *, recent: bool) -> None:
        kind, body = message.kind, message.body
        if kind == "supervision":
            restarts = body["restarts"]
            if recent and isinstance(restarts, dict) and _has_room(self.supervised, message):
                numbers = {printable(name[:80]): int(n) for name, n in [*restarts.items()][:MAX_ACTORS]}
                self._supervised(message.sender, numbers)
            return
        if kind == "run":
            self.steps = max(0, min(int(body["steps"]), MAX_STEPS))
            return
        if kind == "step":
            self._stepped(body, recent=recent)
            return
        if _has_room(self.last_seen, message):
            self.last_seen[message.sender] = time.monotonic()
        if message.role == "prompts" and not kind:
            self.ledger = {name: _short(body.get(name, 0)) for name in (*ROWS, "lead")}
        if message.role == "evaluator" and "eval_version" in body:
            self._evaluated(body["eval_version"], body["eval_reward"])

    def _stepped(self, body: dict[str, Any], *, recent: bool) -> None:
        figure = "reward" if "reward" in body else "loss"
        step, value, at = int(body["step"]), _finite(body[figure]), _finite(body["time"])
        if not 0 <= step < (self.steps or MAX_STEPS):
            return
        if step < self.step:  # a replay, or a run that began anew
            self.step_times.clear()
        while self.curve and self.curve[-1][0] >= step:
            self.curve.pop()
        self.step, self.value, self.moved_at = step + 1, value, time.monotonic()
        self.figure = figure
        self.curve.append((step, value))
        self.batch = {name: _short(body.get(name, 0)) for name in ("staleness", "span")}
        self.training = {name: f"{_finite(body[name]):.4g}" for name in TRAINING if name in body}
        if recent:
            self.step_times.append((at, self.step))

    def _supervised(self, supervisor: str, numbers: dict[str, int]) -> None:
        """Record a supervisor's count of restarts, which its own restart resets."""
        for name, n in self.supervised.get(supervisor, {}).items():
            known = name in self.ended_supervisors or len(self.ended_supervisors) < MAX_ACTORS
            if numbers.get(name, 0) < n and known:
                self.ended_supervisors[name] += n
        self.supervised[supervisor] = numbers

    @property
    def alive(self) -> int:
        """Number of actors that published a metric in the last `SILENT_SECONDS`."""
        now = time.monotonic()
        return sum(now - at < SILENT_SECONDS for at in self.last_seen.values())

    @property
    def restarts(self) -> int:
        """Restarts of all processes since this `relax up`, or since monitoring began."""
        return sum(self.restarted.values())

    @property
    def restarted(self) -> dict[str, int]:
        """Restarts of each process that was restarted."""
        restarts = self.ended_supervisors.copy()
        for children in self.supervised.values():
            restarts.update({name: n for name, n in children.items() if n > 0})
        return dict(restarts | self.announced_restarts)  # of Counters, the larger number of each

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

    @property
    def waits_for(self) -> str:
        """What the whole run waits for; empty if nothing."""
        now, (at, text) = time.monotonic(), self.stall
        waits = printable(self.waits)[:200] if now - self.moved_at > SILENT_SECONDS else ""
        return self.notice or (text if now - at < STALL_SECONDS else "") or self.resuming or waits

    def lines(self, now: float) -> list[str]:
        """Return new failures and announcements as plain lines, each to be printed at once."""
        due = [*self.announced, *self.failures.due(now)]
        self.announced.clear()
        return due

    def line(self) -> str:
        """Format the state as one plain line, for output that is no terminal."""
        left, waits = self.seconds_left, self.waits_for
        waiting = f"; waiting: {waits}" if waits else ""
        if not self.steps:  # an evaluation, or the log has not said yet
            return f"actors {self.alive} restarts {self.restarts}{waiting}"
        return (
            f"step {self.step}/{self.steps} {self.figure} {f'{self.value:.3f}' if self.curve else '?'} "
            f"in_flight {self.ledger.get('in_flight', 0)} staleness {self.batch.get('staleness', 0)} "
            f"actors {self.alive} restarts {self.restarts} "
            f"left {'?' if left is None else f'{left:.0f} s'}{waiting}"
        )


def _has_room(known: Collection[str], message: LogMessage) -> bool:
    """Whether the sender of a message is known, or one of the first `MAX_ACTORS` of its role."""
    if message.sender in known:
        return True
    return sum(name.rpartition(".")[0] == message.role for name in known) < MAX_ACTORS


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or abs(number) > 1e30:  # noqa: PLR2004 sums and differences stay finite
        msg = f"{number} is out of range"
        raise ValueError(msg)
    return number


def _short(value: Any) -> str:
    return printable(str(value)[:20])
