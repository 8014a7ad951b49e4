"""Modelled loads for the decision: demand of the trainer, and seconds a row.

The model is a fluid one, in steps of `STEP` seconds. Engines with R rows finish R / row seconds of them a second. The
trainer takes what it asks for as far as rows are ready, and each row that it takes lets another one be admitted. Rows
that are admitted and not trained are bounded, as `staleness.max` bounds them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from relax_actors.autoscaling.decision import Action, Figures, Timers, decide
from relax_actors.config.autoscaler import AutoscalerSection

HOUR = 3600.0
START_SECONDS, RESTART_SECONDS = 60.0, 90.0
"""Seconds from a scale-out to the new engine's first row, and from an engine's death to the next one's."""
ROW_SECONDS = 60.0
"""Seconds that a row takes in an engine, unless the load says otherwise."""
HOURS, STEP = 4.0, 2.0
"""Length of a load, and the step of the model in seconds."""
STARVED_SHARE = 0.01
"""Share of starvation up to which a fixed size suffices."""
Curve = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Load:
    """A load over time.

    Attributes:
        name: name in tables.
        demand: engines that the trainer keeps busy at `ROW_SECONDS` a row, as a share of those that all admitted rows
            occupy, by seconds since the beginning.
        row_seconds: seconds that a row takes in an engine.
        deaths: times at which an engine dies, whose actor is then restarted.
    """

    name: str
    demand: Curve
    row_seconds: Curve = field(default=lambda _: ROW_SECONDS)
    deaths: Sequence[float] = ()


def flapping(minutes: float) -> Load:
    """Low and high demand in turn, for so many minutes each."""
    return Load("flapping", lambda now: 0.225 if int(now / (60 * minutes)) % 2 else 0.675)


def _deaths(seed: int) -> tuple[float, ...]:
    chance, now, times = random.Random(seed), 0.0, []  # noqa: S311 a model
    while (now := now + chance.expovariate(1 / 180.0)) < HOURS * HOUR:
        times.append(now)
    return tuple(times)


LOADS = (
    Load("steady", lambda _: 0.325),
    Load("burst", lambda now: 0.675 if HOUR <= now < 1.5 * HOUR else 0.225),
    Load("slow leak", lambda _: 0.225, lambda now: ROW_SECONDS * (1 + 2 * now / (HOURS * HOUR))),
    flapping(10.0),
    Load("engine deaths", lambda _: 0.325, deaths=_deaths(5)),
)


@dataclass(slots=True)
class Outcome:
    """Result of a load with one way of choosing the number of engines.

    Attributes:
        starved: share of the rows that the trainer asked for and did not get.
        engine_hours: hours of all engines together.
        changes: times of the changes, in seconds.
        largest: largest number of engines.
    """

    starved: float = 0.0
    engine_hours: float = 0.0
    changes: list[float] = field(default_factory=list)
    largest: int = 0

    @property
    def changes_an_hour(self) -> int:
        """Most changes within any hour."""
        return max((sum(0 <= at - begin < HOUR for at in self.changes) for begin in self.changes), default=0)


class Model:
    """A run under a load.

    Args:
        load: the load.
        rows_per_engine: rows that an engine holds at once.
        admitted: rows that are admitted and not trained, at most.
        engines: number of engines at the beginning.
    """

    def __init__(self, load: Load, rows_per_engine: int, admitted: int, engines: int) -> None:
        self._load, self._rows, self._admitted = load, rows_per_engine, float(admitted)
        self.engines, self.outcome = engines, Outcome(largest=engines)
        self._ready = 0.0
        self._starting: list[float] = []
        self._dead_until: list[float] = []
        self._restarts, self._asked, self._missed = 0, 0.0, 0.0
        self._starving = False
        self._waiting_since: float | None = None

    def advance(self, now: float) -> None:
        """Let `STEP` seconds pass."""
        self._starting = [at for at in self._starting if at > now]
        self._dead_until = [at for at in self._dead_until if at > now]
        died = sum(now <= at < now + STEP for at in self._load.deaths)
        self._dead_until += [now + RESTART_SECONDS] * died
        self._restarts += died
        open_rows = self._admitted - self._ready
        finished = STEP * min(open_rows, self._capacity) / self._load.row_seconds(now)
        wanted = STEP * self._load.demand(now) * self._admitted / ROW_SECONDS
        taken = min(wanted, self._ready + finished)
        self._ready += finished - taken
        self._asked, self._missed = self._asked + wanted, self._missed + wanted - taken
        self._starving = taken < wanted
        begun = now if self._waiting_since is None else self._waiting_since
        self._waiting_since = begun if self._waiting else None
        self.outcome.engine_hours += STEP * self.engines / HOUR
        self.outcome.starved = self._missed / self._asked
        self.outcome.largest = max(self.outcome.largest, self.engines)

    def resize(self, engines: int, now: float) -> None:
        """Change the number of engines; new ones take `START_SECONDS`."""
        self._starting += [now + START_SECONDS] * max(0, engines - self.engines)
        self.engines = engines
        self.outcome.changes.append(now)

    def figures(self, now: float) -> Figures:
        """Return what the autoscaler measures."""
        open_rows = self._admitted - self._ready
        return Figures(
            waiting=math.floor(self._waiting),
            in_hand=math.ceil(min(open_rows, self._capacity)),
            rows_per_engine=self._rows,
            engines=self.engines,
            oldest=0.0 if self._waiting_since is None else now - self._waiting_since,
            starving=self._starving,
            restarts=self._restarts,
            changing=bool(self._starting),
        )

    @property
    def _capacity(self) -> float:
        working = self.engines - len(self._starting) - len(self._dead_until)
        return float(self._rows * max(0, working))

    @property
    def _waiting(self) -> float:
        return max(0.0, self._admitted - self._ready - self._capacity)


def run_fixed(load: Load, rows_per_engine: int, admitted: int, engines: int) -> Outcome:
    """Run a load with a fixed number of engines."""
    model = Model(load, rows_per_engine, admitted, engines)
    for step in range(int(HOURS * HOUR / STEP)):
        model.advance(step * STEP)
    return model.outcome


def run_scaled(load: Load, rows_per_engine: int, admitted: int, section: AutoscalerSection) -> Outcome:
    """Run a load with the autoscaler, from the least number of engines on."""
    model, timers = Model(load, rows_per_engine, admitted, section.min), Timers(changed=0.0)
    due = 0.0
    for step in range(int(HOURS * HOUR / STEP)):
        now = step * STEP
        model.advance(now)
        if now < due:
            continue
        due = now + section.interval
        decision, timers = decide(section, model.figures(now), timers, now)
        if decision.action is not Action.HOLD:
            model.resize(decision.engines, now)
    return model.outcome


def best_fixed(load: Load, rows_per_engine: int, admitted: int, most: int) -> tuple[int, Outcome]:
    """Return the smallest size that starves the trainer for `STARVED_SHARE` at most."""
    for engines in range(1, most + 1):
        outcome = run_fixed(load, rows_per_engine, admitted, engines)
        if outcome.starved <= STARVED_SHARE:
            break
    return engines, outcome
