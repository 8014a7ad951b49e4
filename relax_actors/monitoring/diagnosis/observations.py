"""Figures and events of a run, as the rules of `relax doctor` read them; bounded in size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_actors.monitoring.finding import Evidence
from relax_actors.monitoring.log_message import MAX_STEP, LogMessage
from relax_actors.printable import printable

FIRST_STEPS, LAST_STEPS = 50, 2000
"""Steps at the beginning and at the end of the run whose figures are kept."""
MAX_ACTORS, MAX_READINGS, MAX_EVENTS = 256, 900, 5000
"""Actors, readings of each (about one a second), and events that are kept."""
MAX_NUMBERED = 20_000
"""Weight versions and evaluations that are kept."""
MAX_TEXT = 300
EXTERNAL = "external"
"""Blame of an end that was caused from outside, as supervisors publish it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Figures that an actor published about itself.

    Attributes:
        time: when the broker stored them, in Unix seconds.
        figures: numbers by name.
    """

    time: float
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the run.

    Attributes:
        time: when the broker stored it, in Unix seconds.
        sender: actor that published it, `<role>.<n>`.
        kind: such as `crashed`.
        text: the first line of its error or reason; empty without.
        row: row that it is about; empty without.
        count: events that it stands for: a flood is summed up.
        external: whether a process was killed from outside, so that neither its rows nor its code are to blame.
    """

    time: float
    sender: str
    kind: str
    text: str = ""
    row: str = ""
    count: int = 1
    external: bool = False

    @property
    def role(self) -> str:
        """Role of the sender."""
        return self.sender.rpartition(".")[0]


@dataclass(slots=True)
class Observations:
    """What was seen of a run.

    Attributes:
        run: name of the run.
        settings: its settings as plain data, defaults included.
        steps: figures of the optimizer steps, by step.
        critic: figures of the critic's steps, by step.
        actors: readings of each actor and node, the oldest first.
        generated: durations of generated rows by rollout actor, with the figures `tokens` and `seconds`.
        restarts: restarts of each process, as its supervisor counted them last.
        events: the newest events, the oldest first.
        fingerprints: fingerprint of each published weight version.
        evaluations: mean reward of held-out rows, by version.
        skew: seconds between an actor's clock and the broker's, by actor: the smallest amount seen.
        heard: messages by which the clock of each actor was seen.
        newest: when the broker stored the newest message, in Unix seconds.
    """

    run: str
    settings: Mapping[str, Any]
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    critic: dict[int, dict[str, float]] = field(default_factory=dict)
    actors: dict[str, deque[Reading]] = field(default_factory=dict)
    generated: dict[str, deque[Reading]] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    fingerprints: dict[int, str] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    skew: dict[str, float] = field(default_factory=dict)
    heard: dict[str, int] = field(default_factory=dict)
    newest: float = 0.0

    def take(self, message: LogMessage, stored: float) -> None:
        """Record a message of the log that the broker stored at `stored`, in Unix seconds.

        A malformed one is ignored, and one with a false claim.
        """
        if message.claim:
            return
        self.newest = max(self.newest, stored)
        self._observe_clock(message, stored)
        if message.is_event:
            self._take_event(message, stored)
        elif message.kind in ("step", "critic"):
            self._take_step(message)
        elif message.kind in ("", "generated", "supervision"):
            if message.kind == "supervision":
                self._take_restarts(message)
            of_kind = self.generated if message.kind == "generated" else self.actors
            if message.sender in of_kind or len(of_kind) < MAX_ACTORS:
                readings = of_kind.setdefault(message.sender, deque(maxlen=MAX_READINGS))
                readings.append(Reading(stored, message.numbers()))

    def publish(self, version: int, fingerprint: str) -> None:
        """Record a published weight version."""
        self.fingerprints[version] = fingerprint
        if len(self.fingerprints) > MAX_NUMBERED:
            del self.fingerprints[min(self.fingerprints)]

    def _take_event(self, message: LogMessage, stored: float) -> None:
        body, kind, count = message.body, message.kind, 1
        if kind == "suppressed":
            count, kind = _whole(body.get("count")), str(body.get("of"))[:64]
        if kind == "evaluated":
            version, reward = body.get("version"), body.get("reward")
            if isinstance(version, int) and isinstance(reward, int | float) and len(self.evaluations) < MAX_NUMBERED:
                self.evaluations[version] = float(reward)
        error = body.get("error") or body.get("reason") or body.get("detail") or ""
        text = printable(str(error).strip().partition("\n")[0][:MAX_TEXT])
        row, is_external = str(body.get("row", ""))[:64], body.get("blame") == EXTERNAL
        self.events.append(Event(stored, message.sender, kind, text, row, count, is_external))

    def _take_restarts(self, message: LogMessage) -> None:
        counts = message.body.get("restarts")
        for name, count in [*counts.items()][:MAX_ACTORS] if isinstance(counts, dict) else []:
            if isinstance(count, int) and (name in self.restarts or len(self.restarts) < MAX_ACTORS):
                self.restarts[printable(str(name)[:80])] = count

    def _take_step(self, message: LogMessage) -> None:
        figures = message.numbers()
        step = figures.pop("step", -1.0)
        if not 0 <= step < MAX_STEP:
            return
        of_kind = self.steps if message.kind == "step" else self.critic
        number = int(step)
        # A replayed step has the same figures, but its times are 0.
        if number in of_kind:
            return
        of_kind[number] = figures
        if len(of_kind) > FIRST_STEPS + LAST_STEPS:
            del of_kind[sorted(of_kind)[FIRST_STEPS]]

    def _observe_clock(self, message: LogMessage, stored: float) -> None:
        own = message.body.get("time")
        if isinstance(own, int | float) and abs(own) < MAX_STEP:
            apart, known = stored - float(own), self.skew.get(message.sender)
            if known is None and len(self.skew) >= MAX_ACTORS:
                return
            # A message may wait for a busy broker; the smallest amount is closest to the clocks' difference.
            self.heard[message.sender] = self.heard.get(message.sender, 0) + 1
            self.skew[message.sender] = apart if known is None or abs(apart) < abs(known) else known

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting by dotted name, or the default."""
        value: Any = self.settings
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def series(self, name: str, *, of: Mapping[int, Mapping[str, float]] | None = None) -> list[tuple[int, float]]:
        """Return a figure as (step, value), of the trainer by default."""
        steps = self.steps if of is None else of
        return [(step, figures[name]) for step, figures in sorted(steps.items()) if name in figures]

    def counted(self, *kinds: str) -> int:
        """Return how many events of some kinds were seen."""
        return sum(event.count for event in self.events if event.kind in kinds)

    def of_steps(self, steps: Iterable[int], *, role: str = "trainer", **figures: float) -> Evidence:
        """Return evidence in the metrics of some steps."""
        known = list(steps)
        span = (min(known), max(known)) if known else None
        return Evidence(f"relax.{self.run}.metric.{role}.0", span, figures)

    def of_actor(self, name: str, **figures: float) -> Evidence:
        """Return evidence in the metrics of an actor; `*` for all actors."""
        return Evidence(f"relax.{self.run}.metric.{name}", None, figures)

    def of_events(self, kind: str, sender: str = "*.*", **figures: float) -> Evidence:
        """Return evidence in the events of a kind."""
        return Evidence(f"relax.{self.run}.event.{sender}.{kind}", None, figures)


def _whole(value: object) -> int:
    return max(0, min(int(value), 1 << 40)) if isinstance(value, int | float) and value == value else 0  # noqa: PLR0124
