"""Restart intensity and back-off of the supervisor, on the test's clock."""

from __future__ import annotations

import random
import re

import pytest

from relax_actors.supervision.spec import Backoff, Blame, Exit
from relax_actors.supervision.supervisor import GiveUp, Start
from tests.support.supervisors import CRASH, DONE, KILLED, PERIOD, due, stops, supervisor, up


@pytest.mark.parametrize("outcome", [CRASH, DONE])
def test_one_failure_above_the_intensity_gives_up_and_names_the_settings(outcome: Exit) -> None:
    made = up(supervisor("a", "b", intensity=2))
    for at in (1.0, 10.0):
        assert made.exited("a", outcome, at) == []
        made.tick(at + 5)
        made.ready("a", at + 5)
    actions = made.exited("a", outcome, 20.0)
    assert isinstance(actions[0], GiveUp)
    assert stops(actions) == ["b"]
    assert made.gave_up is not None
    assert made.gave_up.child == "a"
    assert re.match(
        r"3 failures in 19 s .*the limit is 2 in 60 s \(supervision\.intensity, supervision\.period\)",
        made.gave_up.reason,
    )
    assert made.gave_up.reason.endswith(outcome.reason)
    assert made.exited("b", DONE, 21.0) == []
    assert made.ended


def test_intensity_zero_gives_up_at_the_first_failure() -> None:
    made = up(supervisor("a", intensity=0))
    assert isinstance(made.exited("a", CRASH, 1.0)[0], GiveUp)
    assert made.ended


@pytest.mark.parametrize(("second", "gives_up"), [(11.0 + PERIOD, False), (11.0 + PERIOD - 0.001, True)])
def test_failure_counts_for_one_period_of_ready_time(second: float, gives_up: bool) -> None:  # noqa: FBT001
    made = up(supervisor("a", intensity=1))
    made.exited("a", CRASH, 10.0)
    made.tick(11.0)
    made.ready("a", 11.0)
    made.exited("a", CRASH, second)
    assert (made.gave_up is not None) == gives_up


def test_failures_of_all_children_add_up() -> None:
    made = up(supervisor("a", "b", "c", intensity=2))
    made.exited("a", CRASH, 1.0)
    made.exited("b", CRASH, 2.0)
    assert made.gave_up is None
    made.exited("c", CRASH, 3.0)
    assert made.gave_up is not None


def test_external_kills_of_ready_children_are_not_counted() -> None:
    made = up(supervisor(*(f"rollout.{n}" for n in range(20)), intensity=1))
    for child in made.children:
        made.exited(child, KILLED, 10.0)
    now = 10.0
    for _ in range(30):
        now += 100.0
        for action in made.tick(now):
            assert isinstance(action, Start)
            made.ready(action.child, now)
        made.exited("rollout.0", KILLED, now + 1)
    assert made.gave_up is None
    assert made.restarts == 50
    made.exited("rollout.1", CRASH, now + 2)
    assert made.gave_up is None
    made.exited("rollout.2", CRASH, now + 3)
    assert made.gave_up is not None


def test_external_kill_before_readiness_is_counted() -> None:
    made = supervisor("a", intensity=3)
    now, starts = 0.0, made.start(0.0)
    for _ in range(3):
        assert starts == [Start("a")]
        assert made.exited("a", KILLED, now + 10) == []
        now = due(made)
        starts = made.tick(now)
    assert isinstance(made.exited("a", KILLED, now + 10)[0], GiveUp)


def test_deaths_of_the_same_cause_count_once() -> None:
    made = supervisor(*"abcdef", intensity=2)
    now = 0.0
    made.start(now)
    for life in (1, 2, 3):
        with_it = Exit(normal=False, reason="killed with it", blame=Blame.EXTERNAL, cause=f"zygote {life}")
        for child in "abcdef":
            if made.gave_up is None:
                made.exited(child, with_it, now)
        assert (made.gave_up is None) == (life < 3)
        now += 1000.0
        made.tick(now)


def test_intensity_window_does_not_advance_while_a_child_starts() -> None:
    made = up(supervisor("a", intensity=2))
    now = 0.0
    for _ in range(3):
        now += 1.0
        made.exited("a", CRASH, now)
        if made.gave_up is None:
            now = due(made)
            made.tick(now)
            now += 10 * PERIOD
            made.ready("a", now)
    assert made.gave_up is not None


def test_failed_start_is_counted() -> None:
    made = supervisor("a", intensity=2)
    made.start(0.0)
    for at in (1.0, 10.0):
        assert made.exited("a", CRASH, at) == []
        made.tick(at + 5)
    assert isinstance(made.exited("a", CRASH, 20.0)[0], GiveUp)


def test_back_off_doubles_up_to_its_maximum_and_jitter_at_most_halves_it() -> None:
    backoff = Backoff(0.5, 10.0)
    for seed in range(50):
        source = random.Random(seed)
        for failures, full in ((1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 10.0), (7, 10.0), (10**6, 10.0)):
            assert full / 2 <= backoff.delay(failures, source) <= full
    spread = {backoff.delay(1, random.Random(seed)) for seed in range(50)}
    assert max(spread) - min(spread) > 0.2


def test_back_off_grows_with_consecutive_failures_of_one_child() -> None:
    made = up(supervisor("a", "b", base=1.0, most=8.0))
    now = 0.0
    for full in (1.0, 2.0, 4.0, 8.0, 8.0):
        made.exited("a", CRASH, now)
        assert full / 2 <= due(made) - now <= full
        now = due(made)
        made.tick(now)
        made.ready("a", now)
    made.exited("b", CRASH, now)
    assert 0.5 <= due(made) - now <= 1.0


@pytest.mark.parametrize(("quiet", "full"), [(PERIOD, 1.0), (PERIOD - 0.001, 2.0)])
def test_back_off_starts_again_after_a_quiet_period(quiet: float, full: float) -> None:
    made = up(supervisor("a"))
    made.exited("a", CRASH, 5.0)
    made.tick(10.0)
    made.ready("a", 10.0)
    made.exited("a", CRASH, 10.0 + quiet)
    assert full / 2 <= due(made) - (10.0 + quiet) <= full


def test_start_time_does_not_count_as_a_quiet_period() -> None:
    made = up(supervisor("a"))
    made.exited("a", CRASH, 5.0)
    made.tick(10.0)
    made.exited("a", CRASH, 10.0 + 10 * PERIOD)
    assert made.children["a"].failures == 2


def test_uncounted_deaths_are_restarted_forever() -> None:
    made = supervisor("a", intensity=1)
    made.start(0.0)
    away = Exit(normal=False, reason="exit code 73", counted=False)
    now = 0.0
    for _ in range(50):
        made.ready("a", now)
        assert made.exited("a", away, now) == []
        now += 100.0
        assert made.tick(now) == [Start("a")]
    made.ready("a", now)
    assert made.exited("a", CRASH, now) == []
    made.tick(now + 100.0)
    made.ready("a", now + 100.0)
    assert isinstance(made.exited("a", CRASH, now + 100.0)[0], GiveUp)
