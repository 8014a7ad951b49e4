"""Supervisor's decisions as a pure state machine: events in, actions out; clock and random source are passed in.

It follows OTP's supervisor of strategy one_for_one with permanent children, and differs twice for processes that load
models. Restarts are delayed (back-off with jitter). The window of the restart intensity does not advance while a child
starts or waits for its start, so that failures of a child that takes a minute to fail add up.

The restart intensity ends a run whose children cannot start or fail by themselves. External kills of a ready child are
not counted: it is restarted however often it is killed. A kill before it was ready counts. Deaths of the same cause
count once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from relax_actors.counted import counted
from relax_actors.supervision.spec import Backoff, Blame, ChildSpec, Exit, Limits


class Phase(StrEnum):
    """Phase of a child."""

    DOWN = "down"
    BACKING_OFF = "backing_off"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Start:
    """Action: start a child now."""

    child: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Action: stop a child in order, within its `shutdown` seconds."""

    child: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Action: report that the supervisor gives up on a child and stops all."""

    child: str
    reason: str


Action = Start | Stop | GiveUp


@dataclass(slots=True)
class ChildState:
    """State of one child: `since` is when it entered its phase, `due` when its back-off ends, `crashes` how often it
    ended by its own fault since it was added.
    """

    spec: ChildSpec
    phase: Phase = Phase.DOWN
    since: float = 0.0
    due: float = 0.0
    starts: int = 0
    failures: int = 0
    crashes: int = 0
    leaving: bool = False

    @property
    def alive(self) -> bool:
        """Whether the child has a process."""
        return self.phase in (Phase.STARTING, Phase.READY, Phase.STOPPING)


class Supervisor:
    """State machine of one supervisor; its owner carries out the actions and reports events.

    Times are seconds on the monotonic clock.

    Args:
        specs: children in start order; they stop in reverse order.
        limits: the restart intensity.
        backoff: delay of restarts.
        source: random source of the jitter.
    """

    def __init__(self, specs: Sequence[ChildSpec], limits: Limits, backoff: Backoff, source: random.Random) -> None:
        self.children = {spec.id: ChildState(spec) for spec in specs}
        self.stopping = False
        self.gave_up: GiveUp | None = None
        self.restarts = 0
        self._limits, self._backoff, self._random = limits, backoff, source
        # Times of the failures on the clock below and on the monotonic clock.
        self._failures: list[tuple[float, float]] = []
        self._counted_cause = ""
        # Clock that does not advance while a child starts or waits for its start; failures are stamped with it.
        self._ready_time = 0.0
        self._seen = 0.0

    def _advance(self, now: float) -> None:
        if not any(c.phase in (Phase.STARTING, Phase.BACKING_OFF) for c in self.children.values()):
            self._ready_time += max(0.0, now - self._seen)
        self._seen = now

    def start(self, now: float) -> list[Action]:
        """Start all children."""
        self._seen = now
        return [self._start(child, now) for child in self.children.values()]

    def process_started(self, child_id: str, now: float) -> None:
        """Record that a child's process exists; its start deadline counts from here."""
        child = self.children[child_id]
        if child.phase is Phase.STARTING:
            child.since = now

    def allow_for_pause(self, seconds: float) -> None:
        """Extend the start deadlines by a pause of the whole process."""
        for child in self.children.values():
            if child.phase is Phase.STARTING:
                child.since += seconds

    def resize(self, specs: Sequence[ChildSpec], now: float) -> list[Action]:
        """Set the children: start new ones, stop surplus ones."""
        if self.stopping:
            return []
        actions: list[Action] = []
        wanted = {spec.id for spec in specs}
        for child in [c for name, c in self.children.items() if name not in wanted]:
            child.leaving = True
            if child.phase in (Phase.STARTING, Phase.READY):
                self._enter(child, Phase.STOPPING, now)
                actions.append(Stop(child.spec.id))
            elif not child.alive:
                del self.children[child.spec.id]
        for spec in specs:
            if spec.id not in self.children:
                self.children[spec.id] = ChildState(spec)
                actions.append(self._start(self.children[spec.id], now))
            child = self.children[spec.id]
            child.spec = spec
            if child.leaving:
                # A child that is still stopping is started again after its end; its restarts count from there.
                child.leaving, child.starts, child.failures, child.crashes = False, 0, 0, 0
        return actions

    def ready(self, child_id: str, now: float) -> None:
        """Record that a child is ready."""
        child = self.children[child_id]
        self._advance(now)
        if child.phase is Phase.STARTING:
            self._enter(child, Phase.READY, now)

    def exited(self, child_id: str, outcome: Exit, now: float) -> list[Action]:
        """Record the end of a child's process; return what follows."""
        child = self.children[child_id]
        self._advance(now)
        if child.phase is Phase.STOPPING:
            return self._stopped(child, now)
        was_ready = child.phase is Phase.READY
        was_ready_for = now - child.since if was_ready else 0.0
        if self.stopping:
            self._enter(child, Phase.ENDED, now)
            return self._next_stop(now)
        child.crashes += outcome.counted and outcome.blame is not Blame.EXTERNAL
        if outcome.final and not child.spec.on_probation:
            self._enter(child, Phase.ENDED, now)
            return self._give_up(child_id, outcome.reason, now)
        if self._counts(child, outcome, was_ready=was_ready):
            self._failures.append((self._ready_time, now))
        return self._restart(child, outcome, was_ready_for, now)

    def _counts(self, child: ChildState, outcome: Exit, *, was_ready: bool) -> bool:
        if child.spec.on_probation or not outcome.counted or (was_ready and outcome.blame is Blame.EXTERNAL):
            return False
        known = bool(outcome.cause) and outcome.cause == self._counted_cause
        self._counted_cause = outcome.cause or self._counted_cause
        return not known

    def _restart(self, child: ChildState, outcome: Exit, was_ready_for: float, now: float) -> list[Action]:
        self._failures = [(at, when) for at, when in self._failures if self._ready_time - at < self._limits.period]
        if (failures := len(self._failures)) > self._limits.intensity:
            self._enter(child, Phase.ENDED, now)
            return self._give_up(child.spec.id, self._excess(failures, outcome, now), now)
        # After a quiet period the back-off starts from its base again.
        child.failures = 1 if was_ready_for >= self._limits.period else child.failures + 1
        self.restarts += 1
        self._back_off(child, now + self._backoff.delay(child.failures, self._random), now)
        return []

    def _excess(self, failures: int, outcome: Exit, now: float) -> str:
        """Say how many failures there were in which time, and which limit they exceed."""
        counted_first, first = self._failures[0]
        seconds, of_them = now - first, self._ready_time - counted_first
        span = f" in {seconds:.0f} s" if failures > 1 else ""
        # Starts and the waits for them take no time on the clock of the limit.
        span += f" ({of_them:.0f} s without starts)" if failures > 1 and round(seconds) != round(of_them) else ""
        return (
            f"{counted(failures, 'failure')}{span}, and the limit is {self._limits.intensity} in "
            f"{self._limits.period:g} s (supervision.intensity, supervision.period). Last failure: {outcome.reason}"
        )

    def _stopped(self, child: ChildState, now: float) -> list[Action]:
        if self.stopping:
            self._enter(child, Phase.ENDED, now)
            return self._next_stop(now)
        if child.leaving:
            del self.children[child.spec.id]
        else:
            self._back_off(child, child.due, now)
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Start the children whose back-off is over, once no child is stopping."""
        self._advance(now)
        if self.stopping or any(c.phase is Phase.STOPPING for c in self.children.values()):
            return []
        due = [c for c in self.children.values() if c.phase is Phase.BACKING_OFF and c.due <= now]
        return [self._start(child, now) for child in due]

    def next_due(self) -> float | None:
        """Return when the next back-off ends; None if there is none."""
        return min((c.due for c in self.children.values() if c.phase is Phase.BACKING_OFF), default=None)

    def shutdown(self, now: float) -> list[Action]:
        """Stop all children in reverse start order, each after the previous one has ended."""
        if self.stopping:
            return []
        self.stopping = True
        for child in self.children.values():
            if not child.alive:
                self._enter(child, Phase.ENDED, now)
        return self._next_stop(now)

    def _next_stop(self, now: float) -> list[Action]:
        if any(c.phase is Phase.STOPPING for c in self.children.values()):
            return []
        for child in reversed(self.children.values()):
            if child.phase in (Phase.STARTING, Phase.READY):
                self._enter(child, Phase.STOPPING, now)
                return [Stop(child.spec.id)]
        return []

    @property
    def ended(self) -> bool:
        """Whether all children have ended and none will be started."""
        return all(c.phase is Phase.ENDED for c in self.children.values())

    def _give_up(self, child: str, reason: str, now: float) -> list[Action]:
        self.gave_up = GiveUp(child, reason)
        return [self.gave_up, *self.shutdown(now)]

    def _start(self, child: ChildState, now: float) -> Start:
        self._enter(child, Phase.STARTING, now)
        child.starts += 1
        return Start(child.spec.id)

    def _back_off(self, child: ChildState, due: float, now: float) -> None:
        self._enter(child, Phase.BACKING_OFF, now)
        child.due = due

    @staticmethod
    def _enter(child: ChildState, phase: Phase, now: float) -> None:
        child.phase, child.since = phase, now
