"""Decisions of the supervisor: restarts, shutdown and resizing, on the test's clock."""

from __future__ import annotations

import pytest

from relax_actors.supervision.spec import ChildSpec, Exit
from relax_actors.supervision.supervisor import GiveUp, Phase, Start, Stop
from tests.support.supervisors import CONFIG, CRASH, DONE, due, phases, supervisor, up


def test_children_start_in_order() -> None:
    assert supervisor("a", "b", "c").start(0) == [Start("a"), Start("b"), Start("c")]


def test_one_for_one_restarts_only_the_failed_child_after_its_back_off() -> None:
    made = up(supervisor("a", "b", "c"))
    assert made.exited("b", CRASH, 5.0) == []
    assert phases(made) == {"a": Phase.READY, "b": Phase.BACKING_OFF, "c": Phase.READY}
    assert 5.5 <= due(made) <= 6.0
    assert made.tick(due(made) - 0.001) == []
    assert made.tick(due(made)) == [Start("b")]
    assert made.next_due() is None
    assert made.children["b"].starts == 2


@pytest.mark.parametrize("outcome", [DONE, CRASH])
def test_a_child_is_restarted_however_it_ended(outcome: Exit) -> None:
    made = up(supervisor("x", "y"))
    assert made.exited("x", outcome, 5.0) == []
    assert made.tick(100.0) == [Start("x")]
    assert made.gave_up is None


def test_pause_of_the_process_extends_start_deadlines() -> None:
    made = supervisor(ChildSpec("a", start_deadline=10.0), ChildSpec("b", start_deadline=10.0))
    made.start(0.0)
    made.ready("b", 5.0)
    made.allow_for_pause(100.0)
    assert [child.since for child in made.children.values()] == [100.0, 5.0]


def test_start_deadline_counts_from_the_launch() -> None:
    made = supervisor(ChildSpec("a", start_deadline=10.0))
    made.start(0.0)
    made.process_started("a", 50.0)
    assert made.children["a"].since == 50.0


def test_shutdown_stops_children_one_by_one_in_reverse_order() -> None:
    made = up(supervisor("a", "b", "c"))
    assert made.shutdown(1.0) == [Stop("c")]
    assert made.shutdown(1.0) == []
    assert made.tick(99.0) == []
    assert made.exited("c", DONE, 2.0) == [Stop("b")]
    assert made.exited("b", Exit(normal=False, reason="killed by SIGKILL"), 3.0) == [Stop("a")]
    assert not made.ended
    assert made.exited("a", DONE, 4.0) == []
    assert made.ended
    assert made.gave_up is None


def test_shutdown_stops_a_starting_child_and_cancels_a_back_off() -> None:
    made = supervisor("a", "b", "c")
    made.start(0.0)
    made.ready("a", 1.0)
    made.exited("b", CRASH, 1.0)
    assert made.shutdown(1.1) == [Stop("c")]
    assert made.children["b"].phase is Phase.ENDED
    assert made.next_due() is None
    assert made.exited("c", DONE, 1.2) == [Stop("a")]
    made.exited("a", DONE, 1.3)
    assert made.ended
    assert made.tick(99.0) == []


def test_shutdown_before_the_start_ends_at_once() -> None:
    made = supervisor("a")
    assert made.shutdown(0.0) == []
    assert made.ended


def test_child_that_crashes_during_shutdown_is_not_restarted() -> None:
    made = up(supervisor("a", "b"))
    made.shutdown(1.0)
    made.exited("b", CRASH, 2.0)
    made.exited("a", CRASH, 2.0)
    assert made.ended
    assert made.gave_up is None
    assert made.restarts == 0


def test_configuration_error_gives_up_at_once_and_stops_all() -> None:
    made = up(supervisor("a", "b", "c"))
    actions = made.exited("b", CONFIG, 1.0)
    assert actions == [GiveUp("b", CONFIG.reason), Stop("c")]
    assert made.exited("c", DONE, 2.0) == [Stop("a")]
    made.exited("a", DONE, 3.0)
    assert made.ended
    assert made.restarts == 0


def test_readiness_is_ignored_while_stopping() -> None:
    made = up(supervisor("a"))
    made.shutdown(1.0)
    made.ready("a", 2.0)
    assert made.children["a"].phase is Phase.STOPPING


def test_pool_grows_and_shrinks_while_it_runs() -> None:
    made = up(supervisor("a.0", "a.1"))
    assert made.resize([ChildSpec("a.0"), ChildSpec("a.1"), ChildSpec("a.2")], 1.0) == [Start("a.2")]
    made.ready("a.2", 2.0)
    assert made.resize([ChildSpec("a.0")], 3.0) == [Stop("a.1"), Stop("a.2")]
    assert made.exited("a.1", DONE, 4.0) == []
    assert made.exited("a.2", CRASH, 4.0) == []
    assert phases(made) == {"a.0": Phase.READY}
    assert made.restarts == 0


def test_child_added_again_while_it_stops_is_started_after_its_end() -> None:
    made = up(supervisor("a.0", "a.1"))
    assert made.resize([ChildSpec("a.0")], 1.0) == [Stop("a.1")]
    assert made.resize([ChildSpec("a.0"), ChildSpec("a.1")], 1.5) == []
    assert made.exited("a.1", DONE, 2.0) == [Start("a.1")]


def test_child_in_back_off_is_removed_at_once() -> None:
    made = up(supervisor("a.0", "a.1"))
    made.exited("a.1", CRASH, 1.0)
    assert made.resize([ChildSpec("a.0")], 1.0) == []
    assert phases(made) == {"a.0": Phase.READY}
    assert made.tick(1000.0) == []


def test_failures_on_trial_do_not_end_the_run_and_starts_count_anew() -> None:
    made = up(supervisor("a.0"))
    assert made.resize([], 1.0) == [Stop("a.0")]
    assert made.resize([ChildSpec("a.0", on_probation=True)], 1.0) == []
    assert made.exited("a.0", DONE, 2.0) == [Start("a.0")]
    for at in range(10, 100, 10):
        made.ready("a.0", at)
        assert made.exited("a.0", CONFIG, at) == []
        assert made.tick(due(made)) == [Start("a.0")]
    assert (made.gave_up, made.children["a.0"].starts) == (None, 10)
    made.resize([ChildSpec("a.0")], 101.0)
    made.ready("a.0", 102.0)
    assert isinstance(made.exited("a.0", CONFIG, 103.0)[0], GiveUp)


def test_stopping_pool_is_not_resized() -> None:
    made = up(supervisor("a.0"))
    made.shutdown(1.0)
    assert made.resize([ChildSpec("a.0"), ChildSpec("a.1")], 1.0) == []
