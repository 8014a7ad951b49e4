"""Decisions of the autoscaler, with an injected clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.autoscaling.decision import Action, Decision, Figures, Timers, decide
from relax_actors.config.autoscaler import AutoscalerSection

SECTION = AutoscalerSection(min=1, max=8, out_cooldown=0, in_cooldown=0)
BUSY = Figures(waiting=48, in_hand=16, rows_per_engine=16, engines=1, oldest=60.0, starving=True)
IDLE = Figures(waiting=0, in_hand=10, rows_per_engine=16, engines=4, starving=False)


def looks(
    figures: Figures, seconds: float, timers: Timers, section: AutoscalerSection = SECTION, begin: float = 0.0
) -> tuple[list[Decision], Timers]:
    """Look at the same figures for some time, every `interval` seconds."""
    decisions, now = [], begin
    while now <= begin + seconds:
        decision, timers = decide(section, figures, timers, now)
        decisions.append(decision)
        now += section.interval
    return decisions, timers


def actions(decisions: list[Decision]) -> set[Action]:
    return {decision.action for decision in decisions}


def test_engines_are_added_after_rows_have_waited_for_out_for() -> None:
    decisions, _ = looks(BUSY, SECTION.out_for + 5, Timers(0.0))
    assert actions(decisions[:-2]) == {Action.HOLD}
    out = next(decision for decision in decisions if decision.action is Action.OUT)
    assert (out.engines, out.needed) == (2, 4), "at most twice as many at once"


def test_engines_whose_caches_hold_fewer_rows_than_allowed_get_company() -> None:
    full = replace(BUSY, waiting=12, in_hand=8, rows_per_engine=32, working=1)
    decisions, timers = looks(full, SECTION.out_for + 5, Timers(0.0))
    assert next(d for d in decisions if d.action is Action.OUT).needed == 3, "20 rows, of which an engine holds 8"
    busy = replace(full, waiting=0, in_hand=20, engines=3, working=3, starving=False, oldest=0.0)
    later, timers = looks(busy, SECTION.in_for + 60, timers, begin=100.0)
    assert actions(later) == {Action.HOLD}, "they are still needed when no row waits"
    last, _ = looks(busy, 2 * 3600, timers, begin=500.0)
    assert actions(last) == {Action.HOLD, Action.IN}, "after an hour without a row that waits, fewer are tried again"


@pytest.mark.parametrize("change", [{"in_hand": 0, "working": 0}, {"engines": 4}])
def test_engines_that_start_are_not_taken_for_full_ones(change: dict[str, int]) -> None:
    figures = replace(BUSY, waiting=12, in_hand=8, rows_per_engine=32, working=1)
    decisions, _ = looks(replace(figures, **change), 600.0, Timers(0.0))
    assert Action.OUT not in actions(decisions)


@pytest.mark.parametrize(
    "figures",
    [
        replace(BUSY, starving=False),
        replace(BUSY, oldest=1.0),
        replace(BUSY, waiting=0),
        replace(BUSY, spot=3),
        replace(BUSY, changing=True),
        replace(BUSY, engines=8),
    ],
    ids=["the trainer has rows", "rows wait briefly", "none waits", "spot engines", "an operation runs", "the bound"],
)
def test_nothing_is_added_if(figures: Figures) -> None:
    decisions, _ = looks(figures, 600.0, Timers(0.0))
    assert Action.OUT not in actions(decisions)


@pytest.mark.parametrize("name", ["waiting", "in_hand", "engines", "oldest", "starving", "restarts"])
def test_missing_figure_resets_the_timers(name: str) -> None:
    for figures in (BUSY, IDLE):
        _, timers = looks(figures, SECTION.out_for - 5, Timers(0.0))
        decision, timers = decide(SECTION, replace(figures, **{name: None}), timers, SECTION.out_for)
        assert decision.action is Action.HOLD
        assert "no figure" in decision.reason
        assert (timers.more_since, timers.fewer_since) == (None, None)


def test_gap_between_looks_resets_the_timers() -> None:
    _, timers = looks(BUSY, SECTION.out_for - 5, Timers(0.0))
    decision, _ = decide(SECTION, BUSY, timers, 1000.0)
    assert decision.action is Action.HOLD


def test_idle_engines_are_taken_away_to_the_most_that_were_needed() -> None:
    decisions, timers = looks(IDLE, SECTION.in_for - 5, Timers(0.0))
    assert actions(decisions) == {Action.HOLD}
    decisions, timers = looks(replace(IDLE, in_hand=30), 5.0, timers, begin=SECTION.in_for)
    assert [(decision.action, decision.engines) for decision in decisions[:1]] == [(Action.IN, 2)]


@pytest.mark.parametrize(("in_hand", "taken"), [(10, False), (0, True)], ids=["a long row", "no row"])
def test_starving_trainer_keeps_its_rollouts_while_they_have_rows(in_hand: int, *, taken: bool) -> None:
    decisions, _ = looks(replace(IDLE, in_hand=in_hand, starving=True), 600.0, Timers(0.0))
    assert (Action.IN in actions(decisions)) == taken


def test_number_that_still_falls_is_not_settled() -> None:
    _, timers = looks(replace(IDLE, in_hand=40), SECTION.in_for - 5, Timers(0.0))
    decisions, _ = looks(IDLE, SECTION.in_for - 5, timers, begin=SECTION.in_for)
    assert actions(decisions) == {Action.HOLD}


def test_cooldowns_delay_the_next_change() -> None:
    section = SECTION.model_copy(update={"out_cooldown": 120.0})
    decisions, timers = looks(BUSY, 115.0, Timers(0.0), section)
    assert actions(decisions) == {Action.HOLD}
    assert "out_cooldown" in decisions[-1].reason
    decision, _ = decide(section, BUSY, timers, 120.0)
    assert decision.action is Action.OUT


def test_nothing_is_taken_away_if_the_changes_of_the_hour_are_used_up() -> None:
    timers = Timers(100.0, changes=(50.0, 100.0))
    decisions, timers = looks(IDLE, 3000.0, timers, begin=100.0)
    assert actions(decisions) == {Action.HOLD}
    assert "changes_an_hour" in decisions[-1].reason
    decisions, _ = looks(IDLE, 700.0, timers, begin=3100.0)
    assert Action.IN in actions(decisions)


def test_engines_that_keep_dying_get_no_company() -> None:
    timers, now, seen = Timers(0.0), 0.0, []
    while now < 300.0:
        decision, timers = decide(SECTION, replace(BUSY, restarts=int(now / 10)), timers, now)
        seen.append(decision)
        now += SECTION.interval
    assert seen[-1].action is Action.HOLD
    assert "autoscaler.restarts" in seen[-1].reason


def test_engines_return_at_once_to_what_was_there_before_the_last_scale_in() -> None:
    timers = Timers(0.0, before_in=4)
    decisions, _ = looks(BUSY, SECTION.out_for + 5, timers)
    assert [decision.engines for decision in decisions if decision.action is Action.OUT] == [4]


@pytest.mark.parametrize(("engines", "action", "to"), [(9, Action.IN, 8), (1, Action.OUT, 2)])
def test_bounds_hold_at_once(engines: int, action: Action, to: int) -> None:
    section = SECTION.model_copy(update={"min": 2})
    decision, _ = decide(section, replace(IDLE, engines=engines), Timers(0.0), 0.0)
    assert (decision.action, decision.engines) == (action, to)


@pytest.mark.parametrize(("engines", "cooldown"), [(9, "in_cooldown"), (1, "out_cooldown")])
def test_return_to_the_bounds_is_not_repeated_before_the_cooldown_is_over(engines: int, cooldown: str) -> None:
    section = SECTION.model_copy(update={"min": 2, cooldown: 100.0, "changes_an_hour": 9})
    decisions, _ = looks(replace(IDLE, engines=engines), 210.0, Timers(-1000.0), section)
    changed = [n for n, decision in enumerate(decisions) if decision.action is not Action.HOLD]
    assert changed == [0, 100 // section.interval, 200 // section.interval]
    assert f"{cooldown} is not over" in decisions[1].reason


def test_engines_that_keep_dying_get_no_company_below_the_least_number() -> None:
    section, deaths = SECTION.model_copy(update={"min": 2}), (0.0,) * (SECTION.restarts + 1)
    decision, _ = decide(section, replace(IDLE, engines=1), Timers(0.0, restarts=0, deaths=deaths), 1.0)
    assert (decision.action, "autoscaler.restarts" in decision.reason) == (Action.HOLD, True)


def test_failed_operations_double_the_cooldown() -> None:
    section = SECTION.model_copy(update={"min": 2, "out_cooldown": 10.0})
    timers = Timers(0.0)
    for seconds, action in ((35.0, Action.HOLD), (40.0, Action.OUT)):
        decision, _ = decide(section, replace(IDLE, engines=1, failures=2), timers, seconds)
        assert decision.action is action


def test_engines_that_are_not_scaled_hold_the_decision_to_take_some_away() -> None:
    above = replace(IDLE, engines=9)
    decision, timers = decide(SECTION, replace(above, least=9), Timers(0.0), 0.0)
    assert (decision.action, decision.engines, timers.changes) == (Action.HOLD, 9, ())
    decisions, _ = looks(replace(IDLE, least=3), SECTION.in_for, Timers(0.0))
    assert [decision.engines for decision in decisions if decision.action is Action.IN] == [3]


FIGURES = st.builds(
    Figures,
    waiting=st.none() | st.integers(0, 1000),
    in_hand=st.none() | st.integers(0, 1000),
    rows_per_engine=st.integers(1, 64),
    engines=st.none() | st.integers(1, 12),
    spot=st.integers(0, 4),
    oldest=st.none() | st.floats(0, 1000),
    starving=st.none() | st.booleans(),
    restarts=st.none() | st.integers(0, 100),
    changing=st.booleans(),
)


@given(st.lists(st.tuples(FIGURES, st.floats(0, 400)), max_size=30))
def test_any_figures_give_a_number_within_the_bounds_that_fits_the_action(seen: list[tuple[Figures, float]]) -> None:
    timers, now = Timers(0.0), 0.0
    for figures, seconds in seen:
        now += seconds
        decision, timers = decide(SECTION, figures, timers, now)
        if decision.action is Action.HOLD:
            assert decision.engines == (figures.engines or 0)
            continue
        assert figures.engines is not None
        assert SECTION.min <= decision.engines <= SECTION.max
        assert (decision.engines > figures.engines) == (decision.action is Action.OUT)
        assert decision.engines != figures.engines
        if figures.engines <= SECTION.max:
            assert decision.engines - figures.engines <= SECTION.most_out
