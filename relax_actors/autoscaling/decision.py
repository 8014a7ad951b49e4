"""Decide how many rollouts a run should have: pure, with the time passed in.

An engine that holds R rows at once is busy when it has R. With W rows that wait and H rows in hand, a run can use
ceil((W + H) / R) engines. While engines are too few, all rows that may be admitted wait or are in hand; while they
suffice, finished rows wait for the trainer, and H is the number of rows that are necessary to keep it busy (Little's
law). So the number falls to the necessary one by itself, without a model of the engines.

Hysteresis: engines are added when the trainer starves, and more have been necessary for `out_for` seconds; they are
taken away when fewer have sufficed for `in_for`. Few changes an hour leave room for a scale-in, so that a load that
comes and goes keeps its engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from relax_actors.config.autoscaler import AutoscalerSection

HOUR = 3600.0
MOST_DOUBLINGS = 6
"""Failed operations in a row of which each doubles the cool-downs; more change nothing."""


class Action(StrEnum):
    """What to do."""

    OUT = "out"
    IN = "in"
    HOLD = "hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Measurements at one time; None for a figure that is missing.

    Attributes:
        waiting: rows that wait for a rollout.
        in_hand: rows that rollouts hold.
        rows_per_engine: rows that a rollout holds at once.
        engines: rollouts that the run should have now, those that start included, on nodes not marked as spot.
        least: number of engines that remain at least: those that are not scaled, and one.
        spot: rollouts on nodes marked as spot that work.
        working: all rollouts that hold rows; 0 if unknown.
        oldest: age of the oldest waiting row in seconds; 0 if none waits.
        starving: whether the trainer waits for rows.
        restarts: restarts of rollouts so far.
        changing: whether an operation on the rollouts runs.
        failures: operations of the autoscaler that failed since the last that did not.
    """

    waiting: int | None
    in_hand: int | None
    rows_per_engine: int
    engines: int | None
    least: int = 0
    spot: int = 0
    working: int = 0
    oldest: float | None = 0.0
    starving: bool | None = None
    restarts: int | None = 0
    changing: bool = False
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Timers:
    """State of the decision between two looks; times on the clock of `decide`.

    Attributes:
        seen: time of the last look with all figures.
        more_since: since when more engines are needed; None if they are not.
        fewer_since: since when fewer are needed; None if they are not.
        changed: time of the last change, or of the start.
        low: least number of engines that was needed lately; `fewer_since` begins again with each new one.
        peak: largest number of engines that was needed since `fewer_since`.
        before_in: number of engines before the last scale-in.
        changes: times of the changes within an hour.
        starved: share of the trainer's time without rows, averaged over `out_for` seconds.
        restarts: restarts at the last look; None before the first.
        deaths: times of the restarts within `restart_period`.
        holds: rows that an engine held when it was full with fewer than allowed; 0 if none was within an hour.
        held_at: time of this measurement.
    """

    changed: float
    seen: float | None = None
    more_since: float | None = None
    fewer_since: float | None = None
    low: int = 0
    peak: int = 0
    before_in: int = 0
    changes: Sequence[float] = ()
    starved: float = 0.0
    restarts: int | None = None
    deaths: Sequence[float] = ()
    holds: int = 0
    held_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why.

    Attributes:
        action: out, in, or hold.
        engines: number of engines to have.
        needed: number of engines that the run can use; None if figures are missing.
        reason: one line for people; it contains no figure that differs at each look.
    """

    action: Action
    engines: int
    needed: int | None
    reason: str


def decide(section: AutoscalerSection, figures: Figures, timers: Timers, now: float) -> tuple[Decision, Timers]:
    """Decide once.

    Args:
        section: bounds and times.
        figures: measurements.
        timers: state after the last look.
        now: seconds on a monotonic clock.

    Returns:
        The decision, and the state for the next look. The caller carries the decision out; it is not repeated before
        the cool-down is over.
    """
    if (missing := _missing(figures)) or figures.engines is None:
        have = figures.engines or 0
        return Decision(Action.HOLD, have, None, f"no figure: {missing}"), _without_timers(timers, now)
    factor = 2.0 ** min(figures.failures, MOST_DOUBLINGS)
    cooldowns = {name: factor * getattr(section, name) for name in ("out_cooldown", "in_cooldown")}
    section = section.model_copy(update=cooldowns)
    timers = _observed(section, figures, timers, now)
    starves = timers.starved >= section.starved
    waits = starves and bool(figures.waiting) and (figures.oldest or 0.0) >= section.waiting_seconds
    timers = _with_rows_held(figures, timers, now, are_full=waits)
    have, needed = figures.engines, needed_engines(section, figures, timers.holds)
    if figures.changing:
        return Decision(Action.HOLD, have, needed, "an operation on the rollouts runs"), _without_timers(timers, now)
    if have < section.min or have > section.max:
        decision, timers = _within_bounds(section, timers, (have, needed), now), _without_timers(timers, now)
        return _carried_out(decision, figures.least, have, timers, now)
    begun = now if timers.more_since is None else timers.more_since
    more_since = begun if needed > have and waits else None
    # The trainer may wait for the last, long rows of a step; without any row the rollouts are not to blame.
    idle = not starves or figures.waiting == figures.in_hand == 0
    timers = _with_fewer(replace(timers, more_since=more_since), needed, now, holds=needed < have and idle)
    return _carried_out(_weighed(section, timers, (have, needed), now), figures.least, have, timers, now)


def needed_engines(section: AutoscalerSection, figures: Figures, holds: int = 0) -> int:
    """Return how many engines a run can use, working spot engines included.

    `holds` are the rows that an engine can hold, if they are fewer than `rows_per_engine`.
    """
    rows = (figures.waiting or 0) + (figures.in_hand or 0)
    wanted = math.ceil(rows / max(1, holds or figures.rows_per_engine)) - figures.spot
    return max(section.min, min(section.max, wanted))


def _with_rows_held(figures: Figures, timers: Timers, now: float, *, are_full: bool) -> Timers:
    """Measure how many rows an engine holds.

    Rows that wait for long find the engines full, perhaps with fewer rows than allowed, as their key-value caches are.
    The number is used for an hour, also when no row waits, and then forgotten: rows may be shorter by then.
    """
    held = math.ceil((figures.in_hand or 0) / figures.working) if figures.working else 0
    if are_full and held > 0 and not timers.deaths:
        return replace(timers, holds=min(held, figures.rows_per_engine), held_at=now)
    return replace(timers, holds=0) if now - timers.held_at > HOUR else timers


def _weighed(section: AutoscalerSection, timers: Timers, sizes: tuple[int, int], now: float) -> Decision:
    have, needed = sizes
    if timers.more_since is not None:
        if why := _against_out(section, timers, timers.more_since, now):
            return Decision(Action.HOLD, have, needed, why)
        # At most twice as many, for what starves is not known; or as many as there were before the last scale-in.
        target = min(needed, have + section.most_out, max(2 * have, timers.before_in))
        return Decision(Action.OUT, target, needed, "rows wait for rollouts, and the trainer for rows")
    if timers.fewer_since is not None:
        why = _against_in(section, timers, timers.fewer_since, now)
        action, target = (Action.HOLD, have) if why else (Action.IN, timers.peak)
        return Decision(action, target, needed, why or "rollouts are idle")
    return Decision(Action.HOLD, have, needed, "the rollouts suffice")


def _within_bounds(section: AutoscalerSection, timers: Timers, sizes: tuple[int, int], now: float) -> Decision:
    """Return to the bounds once the last change is long enough ago."""
    have, needed = sizes
    if have < section.min:
        action, bound, why = Action.OUT, section.min, _limit_of_out(section, timers, now)
    else:
        action, bound, why = Action.IN, section.max, _limit_of_in(section, timers, now)
    if why:
        return Decision(Action.HOLD, have, needed, f"outside the bounds; {why}")
    return Decision(action, bound, needed, "the bounds")


def _against_out(section: AutoscalerSection, timers: Timers, since: float, now: float) -> str:
    """Return why no engines are added yet; empty if they are."""
    why = _limit_of_out(section, timers, now)
    if now - since < section.out_for and len(timers.deaths) <= section.restarts:
        return "rows wait, not yet for autoscaler.out_for"
    return f"rows wait; {why}" if why else ""


def _against_in(section: AutoscalerSection, timers: Timers, since: float, now: float) -> str:
    """Return why no engines are taken away yet; empty if they are."""
    if now - since < section.in_for:
        return "rollouts are idle, not yet for autoscaler.in_for"
    why = _limit_of_in(section, timers, now)
    return f"rollouts are idle; {why}" if why else ""


def _limit_of_out(section: AutoscalerSection, timers: Timers, now: float) -> str:
    """Return why no engines may be added now, whatever the load; empty if they may."""
    if len(timers.deaths) > section.restarts:
        return "rollouts restart more often than autoscaler.restarts: others would, too"
    return "autoscaler.out_cooldown is not over" if now - timers.changed < section.out_cooldown else ""


def _limit_of_in(section: AutoscalerSection, timers: Timers, now: float) -> str:
    """Return why no engines may be taken away now, whatever the load; empty if they may."""
    if now - timers.changed < section.in_cooldown:
        return "autoscaler.in_cooldown is not over"
    used_up = sum(now - at < HOUR for at in timers.changes) > section.changes_an_hour - 2
    return "autoscaler.changes_an_hour is used up" if used_up else ""


def _missing(figures: Figures) -> str:
    """Name the figures without which nothing is decided."""
    named = {
        "rows of the consumer": figures.waiting is None or figures.in_hand is None or figures.oldest is None,
        "nodes with rollouts": figures.engines is None or figures.restarts is None,
        "what the trainer waits for": figures.starving is None,
    }
    return ", ".join(name for name, is_missing in named.items() if is_missing)


def _without_timers(timers: Timers, now: float) -> Timers:
    return replace(timers, more_since=None, fewer_since=None, low=0, peak=0, starved=0.0, seen=now)


def _with_fewer(timers: Timers, needed: int, now: float, *, holds: bool) -> Timers:
    """Follow how many engines are needed while fewer; a falling number is unsettled."""
    if not holds:
        return replace(timers, fewer_since=None, low=0, peak=0)
    if timers.fewer_since is None or needed < timers.low:
        return replace(timers, fewer_since=now, low=needed, peak=needed)
    return replace(timers, peak=max(timers.peak, needed))


def _observed(section: AutoscalerSection, figures: Figures, timers: Timers, now: float) -> Timers:
    """Average the starvation and count restarts; a long gap resets the timers."""
    gap = 0.0 if timers.seen is None else now - timers.seen
    if gap > max(3 * section.interval, section.interval + 5.0):
        timers = _without_timers(timers, now)
    weight = min(1.0, gap / section.out_for) if section.out_for else 1.0
    starved = timers.starved + weight * (float(bool(figures.starving)) - timers.starved)
    total = figures.restarts or 0
    new = 0 if timers.restarts is None else max(0, total - timers.restarts)
    deaths = [at for at in timers.deaths if now - at < section.restart_period] + [now] * new
    # More deaths than the limit change nothing.
    recent = tuple(deaths[-section.restarts - 1 :])
    return replace(timers, seen=now, starved=starved, restarts=total, deaths=recent)


def _carried_out(decision: Decision, least: int, have: int, timers: Timers, now: float) -> tuple[Decision, Timers]:
    """Return what can be done of a decision, and the state afterwards."""
    if decision.action is Action.IN and max(decision.engines, least) >= have:
        why = f"{decision.reason}; those that are left are not scaled: the last of the node, or on other nodes"
        decision = replace(decision, action=Action.HOLD, engines=have, reason=why)
    if decision.action is Action.HOLD:
        return decision, timers
    if decision.action is Action.IN:
        decision = replace(decision, engines=max(decision.engines, least))
    changes = (*(at for at in timers.changes if now - at < HOUR), now)
    before_in = have if decision.action is Action.IN else timers.before_in
    return decision, _without_timers(replace(timers, changed=now, changes=changes, before_in=before_in), now)


@dataclass(frozen=True, slots=True)
class Place:
    """A node with rollouts that may be scaled.

    Attributes:
        node: number of the node.
        engines: its rollouts, without clients of external engines.
        room: further rollouts for which it has free GPUs; None if they compute on none, so that nothing limits them.
        actors: all its actors; of two nodes without GPUs the one with fewer actors gets the next rollout.
    """

    node: int
    engines: int
    room: int | None = None
    actors: int = 0


def place_for(places: Sequence[Place], change: int) -> tuple[Place, int] | None:
    """Return a node and its rollouts afterwards; None if no node can change.

    Rollouts are added where most GPUs are free, else where fewest actors are; they are taken from the node with most
    rollouts, so that one remains on each. One node is changed at a time, because an operation is of one node; the next
    decision changes another.

    Args:
        places: nodes that may be scaled.
        change: number of rollouts to add, negative to take away.
    """
    if change > 0:
        free = [place for place in places if place.room is None or place.room > 0]
        if not free:
            return None
        best = max(free, key=lambda p: (p.room is not None, p.room or 0, -p.actors, -p.node))
        return best, best.engines + (change if best.room is None else min(change, best.room))
    if not places:
        return None
    most = max(places, key=lambda p: (p.engines, p.node))
    after = max(1, most.engines + change)
    return None if after == most.engines else (most, after)
