"""The supervisor's decisions, as a pure state machine: events in, actions out, the clock and chance passed in.

It follows OTP's supervisor, with two differences that processes which load models call for: restarts wait (back-off
with jitter), and the window of the restart intensity stands still while a child starts or waits to be started, so that
a child which takes a minute to fail is not forgotten before it fails again.

The intensity is there to end what cannot come up, or does not stay up by its own fault. A child that was ready and was
then killed from outside shows neither: it is restarted, however often, and uses up nothing; killed before it was ready
it does. Deaths of one cause count once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from relax_actors.supervision.spec import Backoff, Blame, ChildSpec, Exit, Limits, Restart, Strategy


class Phase(StrEnum):
    """Where a child is in its life."""

    DOWN = "down"
    BACKING_OFF = "backing_off"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Start:
    """Start a child now."""

    child: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop a child in order, within its `shutdown` seconds."""

    child: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The supervisor cannot keep its children up; it stops them all."""

    child: str
    reason: str


Action = Start | Stop | GiveUp


@dataclass(slots=True)
class ChildState:
    """One child's state: `due` when backing off, `since` when it entered its phase."""

    spec: ChildSpec
    phase: Phase = Phase.DOWN
    since: float = 0.0
    due: float = 0.0
    starts: int = 0
    failures: int = 0
    leaving: bool = False

    @property
    def alive(self) -> bool:
        """Whether there is a process."""
        return self.phase in (Phase.STARTING, Phase.READY, Phase.STOPPING)


class Supervisor:
    """Decides; whoever owns it carries the actions out and reports what happens.

    Args:
        specs: children in the order of their start; they stop in the reverse order.
        strategy: who is restarted with a failed child.
        limits: the restart intensity.
        backoff: waits before restarts.
        source: source of the jitter.
    """

    def __init__(
        self, specs: Sequence[ChildSpec], strategy: Strategy, limits: Limits, backoff: Backoff, source: random.Random
    ) -> None:
        self.children = {spec.id: ChildState(spec) for spec in specs}
        self.stopping = False
        self.gave_up: GiveUp | None = None
        self.restarts = 0
        self._strategy, self._limits, self._backoff, self._random = strategy, limits, backoff, source
        self._failures: list[float] = []
        self._counted_cause = ""
        # A clock that stands still while a child starts or waits to be started; failures are stamped with it.
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
        """A child that was to start has a process only now: its start is reckoned from here."""
        child = self.children[child_id]
        if child.phase is Phase.STARTING:
            child.since = now

    def allow_for_pause(self, seconds: float) -> None:
        """All of us stood still for so long: children that were starting had no time to."""
        for child in self.children.values():
            if child.phase is Phase.STARTING:
                child.since += seconds

    def resize(self, specs: Sequence[ChildSpec], now: float) -> list[Action]:
        """Have just these children: start those that are new, stop those that are no longer wanted."""
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
            # One that is still stopping is started again once it is gone.
            self.children[spec.id].leaving = False
        return actions

    def ready(self, child_id: str, now: float) -> None:
        """A child is ready to work."""
        child = self.children[child_id]
        self._advance(now)
        if child.phase is Phase.STARTING:
            self._enter(child, Phase.READY, now)

    def exited(self, child_id: str, outcome: Exit, now: float) -> list[Action]:
        """A child's process is gone."""
        child = self.children[child_id]
        self._advance(now)
        if child.phase is Phase.STOPPING:
            return self._stopped(child, now)
        was_ready = child.phase is Phase.READY
        was_ready_for = now - child.since if was_ready else 0.0
        again = child.spec.restart is Restart.PERMANENT or (
            child.spec.restart is Restart.TRANSIENT and not outcome.normal
        )
        if self.stopping or not again:
            self._enter(child, Phase.ENDED, now)
            return self._next_stop(now) if self.stopping else []
        if outcome.final:
            self._enter(child, Phase.ENDED, now)
            return self._give_up(child_id, outcome.reason, now)
        if self._counts(outcome, was_ready=was_ready):
            self._failures.append(self._ready_time)
        return self._restart(child, outcome, was_ready_for, now)

    def _counts(self, outcome: Exit, *, was_ready: bool) -> bool:
        if not outcome.counted or (was_ready and outcome.blame is Blame.EXTERNAL):
            return False
        known = bool(outcome.cause) and outcome.cause == self._counted_cause
        self._counted_cause = outcome.cause or self._counted_cause
        return not known

    def _restart(self, child: ChildState, outcome: Exit, was_ready_for: float, now: float) -> list[Action]:
        self._failures = [at for at in self._failures if self._ready_time - at < self._limits.period]
        if len(self._failures) > self._limits.intensity:
            self._enter(child, Phase.ENDED, now)
            reason = (
                f"{len(self._failures)} failures within {self._limits.period:g} s, allowed are "
                f"{self._limits.intensity} (supervision.intensity, supervision.period); the last: {outcome.reason}"
            )
            return self._give_up(child.spec.id, reason, now)
        # A quiet time makes an earlier failure count no more for the wait.
        child.failures = 1 if was_ready_for >= self._limits.period else child.failures + 1
        due = now + self._backoff.delay(child.failures, self._random)
        self.restarts += 1
        self._back_off(child, due, now)
        actions: list[Action] = []
        for other in reversed(self._affected_by(child)):
            if other.phase in (Phase.STARTING, Phase.READY):
                self._enter(other, Phase.STOPPING, now)
                other.due = due
                actions.append(Stop(other.spec.id))
            elif other.phase in (Phase.BACKING_OFF, Phase.STOPPING):
                other.due = max(other.due, due)
        return actions

    def _affected_by(self, child: ChildState) -> list[ChildState]:
        everyone = list(self.children.values())
        if self._strategy is Strategy.ONE_FOR_ONE:
            return []
        if self._strategy is Strategy.REST_FOR_ONE:
            return everyone[everyone.index(child) + 1 :]
        return [other for other in everyone if other is not child]

    def _stopped(self, child: ChildState, now: float) -> list[Action]:
        if self.stopping:
            self._enter(child, Phase.ENDED, now)
            return self._next_stop(now)
        if child.leaving:
            del self.children[child.spec.id]
        elif child.spec.restart is Restart.TEMPORARY:
            self._enter(child, Phase.ENDED, now)
        else:
            self._back_off(child, child.due, now)
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Start the children whose wait is over, once none of their group is still stopping."""
        self._advance(now)
        if self.stopping or any(c.phase is Phase.STOPPING for c in self.children.values()):
            return []
        due = [c for c in self.children.values() if c.phase is Phase.BACKING_OFF and c.due <= now]
        return [self._start(child, now) for child in due]

    def next_due(self) -> float | None:
        """When `tick` has something to do; None if nothing waits."""
        return min((c.due for c in self.children.values() if c.phase is Phase.BACKING_OFF), default=None)

    def overdue(self, now: float) -> list[str]:
        """Children that have been starting for longer than they may."""
        return [
            c.spec.id
            for c in self.children.values()
            if c.phase is Phase.STARTING and now - c.since > c.spec.start_deadline
        ]

    def shutdown(self, now: float) -> list[Action]:
        """Stop all children, the last started first, each after the one before is gone."""
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
        """Whether no child lives or will be started."""
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
