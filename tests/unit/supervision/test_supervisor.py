"""Decisions of the supervisor: strategies, restart types, shutdown and resizing, on the test's clock."""

from __future__ import annotations

import pytest

from relax_actors.supervision.spec import ChildSpec, Exit, Restart, Strategy
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


def test_rest_for_one_restarts_the_failed_child_and_later_ones_in_order_once_all_have_ended() -> None:
    made = up(supervisor("a", "b", "c", "d", strategy=Strategy.REST_FOR_ONE))
    assert made.exited("b", CRASH, 5.0) == [Stop("d"), Stop("c")]
    assert made.children["a"].phase is Phase.READY
    assert made.tick(100.0) == []
    assert made.exited("c", DONE, 100.0) == []
    assert made.exited("d", DONE, 101.0) == [Start("b"), Start("c"), Start("d")]


def test_rest_for_one_does_not_touch_earlier_children() -> None:
    made = up(supervisor("a", "b", "c", strategy=Strategy.REST_FOR_ONE))
    assert made.exited("c", CRASH, 5.0) == []
    assert made.tick(7.0) == [Start("c")]


@pytest.mark.parametrize("failed", ["a", "b", "c"])
def test_one_for_all_stops_the_others_in_reverse_order_and_starts_all_once_all_have_ended(failed: str) -> None:
    made = up(supervisor("a", "b", "c", strategy=Strategy.ONE_FOR_ALL))
    others = [child for child in ("c", "b", "a") if child != failed]
    assert made.exited(failed, CRASH, 5.0) == [Stop(child) for child in others]
    assert made.exited(others[0], DONE, 20.0) == []
    assert made.exited(others[1], DONE, 21.0) == [Start("a"), Start("b"), Start("c")]


def test_one_for_all_waits_for_the_back_off_if_all_end_early() -> None:
    made = up(supervisor("a", "b", strategy=Strategy.ONE_FOR_ALL))
    made.exited("a", CRASH, 5.0)
    assert made.exited("b", DONE, 5.1) == []
    assert made.tick(due(made)) == [Start("a"), Start("b")]


def test_end_of_a_stopped_sibling_is_no_failure() -> None:
    made = up(supervisor("a", "b", "c", strategy=Strategy.ONE_FOR_ALL, intensity=1))
    made.exited("a", CRASH, 5.0)
    made.exited("b", CRASH, 5.1)
    assert made.exited("c", Exit(normal=False, reason="killed by SIGKILL"), 9.0) == [Start("a"), Start("b"), Start("c")]
    assert made.gave_up is None
    assert made.restarts == 1


def test_stopped_temporary_sibling_is_not_restarted() -> None:
    made = up(supervisor("a", ChildSpec("t", Restart.TEMPORARY), strategy=Strategy.ONE_FOR_ALL))
    assert made.exited("a", CRASH, 5.0) == [Stop("t")]
    assert made.exited("t", DONE, 9.0) == [Start("a")]


@pytest.mark.parametrize(
    ("restart", "outcome", "again"),
    [
        (Restart.PERMANENT, DONE, True),
        (Restart.PERMANENT, CRASH, True),
        (Restart.TRANSIENT, DONE, False),
        (Restart.TRANSIENT, CRASH, True),
        (Restart.TEMPORARY, DONE, False),
        (Restart.TEMPORARY, CRASH, False),
        (Restart.TEMPORARY, CONFIG, False),
    ],
)
def test_restart_type_decides_about_the_restart(restart: Restart, outcome: Exit, again: bool) -> None:  # noqa: FBT001
    made = up(supervisor(ChildSpec("x", restart), "y"))
    assert made.exited("x", outcome, 5.0) == []
    assert made.tick(100.0) == ([Start("x")] if again else [])
    assert made.gave_up is None


def test_supervisor_has_ended_once_no_child_will_be_restarted() -> None:
    made = up(supervisor(ChildSpec("x", Restart.TRANSIENT), ChildSpec("y", Restart.TEMPORARY)))
    made.exited("x", DONE, 1.0)
    assert not made.ended
    made.exited("y", CRASH, 1.0)
    assert made.ended
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


def test_shutdown_during_a_restart_of_all_children_ends_all() -> None:
    made = up(supervisor("a", "b", "c", strategy=Strategy.ONE_FOR_ALL))
    assert made.exited("a", CRASH, 1.0) == [Stop("c"), Stop("b")]
    assert made.shutdown(1.1) == []
    assert made.exited("b", DONE, 1.2) == []
    assert made.exited("c", DONE, 1.3) == []
    assert made.ended


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


def test_stopping_pool_is_not_resized() -> None:
    made = up(supervisor("a.0"))
    made.shutdown(1.0)
    assert made.resize([ChildSpec("a.0"), ChildSpec("a.1")], 1.0) == []
