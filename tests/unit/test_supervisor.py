"""The supervisor decides as OTP's does, with back-off, on a clock and chance of the test's."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from relax_actors.supervision.spec import Backoff, Blame, ChildSpec, Exit, Limits, Restart, Strategy
from relax_actors.supervision.supervisor import Action, GiveUp, Phase, Start, Stop, Supervisor

CRASH = Exit(normal=False, reason="exit code 70: boom")
DONE = Exit(normal=True, reason="ended")
KILLED = Exit(normal=False, reason="killed by SIGKILL", blame=Blame.EXTERNAL)
CONFIG = Exit(normal=False, reason="exit code 2: no such key", final=True)
PERIOD = 60.0


def supervisor(
    *children: str | ChildSpec,
    strategy: Strategy = Strategy.ONE_FOR_ONE,
    intensity: int = 100,
    base: float = 1.0,
    most: float = 64.0,
) -> Supervisor:
    specs = [ChildSpec(child) if isinstance(child, str) else child for child in children]
    return Supervisor(specs, strategy, Limits(intensity, PERIOD), Backoff(base, most), random.Random(7))


def up(made: Supervisor, now: float = 0.0) -> Supervisor:
    """Start all children and let them be ready at once."""
    assert made.start(now) == [Start(child) for child in made.children]
    for child in made.children:
        made.ready(child, now)
    return made


def stops(actions: Iterable[Action]) -> list[str]:
    return [action.child for action in actions if isinstance(action, Stop)]


def phases(made: Supervisor) -> dict[str, Phase]:
    return {name: child.phase for name, child in made.children.items()}


def due(made: Supervisor) -> float:
    found = made.next_due()
    assert found is not None
    return found


def test_children_start_in_their_order() -> None:
    assert supervisor("a", "b", "c").start(0) == [Start("a"), Start("b"), Start("c")]


def test_one_for_one_restarts_the_failed_child_alone_and_after_its_wait() -> None:
    made = up(supervisor("a", "b", "c"))
    assert made.exited("b", CRASH, 5.0) == []
    assert phases(made) == {"a": Phase.READY, "b": Phase.BACKING_OFF, "c": Phase.READY}
    assert 5.5 <= due(made) <= 6.0
    assert made.tick(due(made) - 0.001) == []
    assert made.tick(due(made)) == [Start("b")]
    assert made.next_due() is None
    assert made.children["b"].starts == 2


def test_rest_for_one_restarts_the_failed_child_and_those_after_it_in_order_when_all_are_down() -> None:
    made = up(supervisor("a", "b", "c", "d", strategy=Strategy.REST_FOR_ONE))
    assert made.exited("b", CRASH, 5.0) == [Stop("d"), Stop("c")]
    assert made.children["a"].phase is Phase.READY
    assert made.tick(100.0) == []
    assert made.exited("c", DONE, 100.0) == []
    assert made.exited("d", DONE, 101.0) == [Start("b"), Start("c"), Start("d")]


def test_rest_for_one_leaves_those_before_a_failed_child_alone() -> None:
    made = up(supervisor("a", "b", "c", strategy=Strategy.REST_FOR_ONE))
    assert made.exited("c", CRASH, 5.0) == []
    assert made.tick(7.0) == [Start("c")]


@pytest.mark.parametrize("failed", ["a", "b", "c"])
def test_one_for_all_stops_the_others_in_reverse_and_starts_all_when_all_are_down(failed: str) -> None:
    made = up(supervisor("a", "b", "c", strategy=Strategy.ONE_FOR_ALL))
    others = [child for child in ("c", "b", "a") if child != failed]
    assert made.exited(failed, CRASH, 5.0) == [Stop(child) for child in others]
    assert made.exited(others[0], DONE, 20.0) == []
    assert made.exited(others[1], DONE, 21.0) == [Start("a"), Start("b"), Start("c")]


def test_one_for_all_waits_for_the_back_off_when_all_are_down_early() -> None:
    made = up(supervisor("a", "b", strategy=Strategy.ONE_FOR_ALL))
    made.exited("a", CRASH, 5.0)
    assert made.exited("b", DONE, 5.1) == []
    assert made.tick(due(made)) == [Start("a"), Start("b")]


def test_a_sibling_that_is_stopped_or_dies_of_it_counts_as_no_failure() -> None:
    made = up(supervisor("a", "b", "c", strategy=Strategy.ONE_FOR_ALL, intensity=1))
    made.exited("a", CRASH, 5.0)
    made.exited("b", CRASH, 5.1)
    assert made.exited("c", Exit(normal=False, reason="killed by SIGKILL"), 9.0) == [Start("a"), Start("b"), Start("c")]
    assert made.gave_up is None
    assert made.restarts == 1


def test_a_temporary_sibling_that_is_stopped_is_not_started_again() -> None:
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
def test_restart_says_who_is_started_again(restart: Restart, outcome: Exit, again: bool) -> None:  # noqa: FBT001
    made = up(supervisor(ChildSpec("x", restart), "y"))
    assert made.exited("x", outcome, 5.0) == []
    assert made.tick(100.0) == ([Start("x")] if again else [])
    assert made.gave_up is None


def test_a_supervisor_has_ended_when_its_last_child_ended_for_good() -> None:
    made = up(supervisor(ChildSpec("x", Restart.TRANSIENT), ChildSpec("y", Restart.TEMPORARY)))
    made.exited("x", DONE, 1.0)
    assert not made.ended
    made.exited("y", CRASH, 1.0)
    assert made.ended
    assert made.gave_up is None


@pytest.mark.parametrize("outcome", [CRASH, DONE])
def test_one_failure_over_the_intensity_gives_up_and_names_the_settings(outcome: Exit) -> None:
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
    assert re.match(r"3 failures within 60 s.* 2 .*supervision\.intensity, supervision\.period", made.gave_up.reason)
    assert made.gave_up.reason.endswith(outcome.reason)
    assert made.exited("b", DONE, 21.0) == []
    assert made.ended


def test_an_intensity_of_none_gives_up_at_the_first_failure() -> None:
    made = up(supervisor("a", intensity=0))
    assert isinstance(made.exited("a", CRASH, 1.0)[0], GiveUp)
    assert made.ended


@pytest.mark.parametrize(("second", "gives_up"), [(11.0 + PERIOD, False), (11.0 + PERIOD - 0.001, True)])
def test_a_failure_counts_for_just_the_period_of_being_ready(second: float, gives_up: bool) -> None:  # noqa: FBT001
    made = up(supervisor("a", intensity=1))
    made.exited("a", CRASH, 10.0)
    made.tick(11.0)
    made.ready("a", 11.0)
    made.exited("a", CRASH, second)
    assert (made.gave_up is not None) == gives_up


def test_failures_of_all_children_count_together() -> None:
    made = up(supervisor("a", "b", "c", intensity=2))
    made.exited("a", CRASH, 1.0)
    made.exited("b", CRASH, 2.0)
    assert made.gave_up is None
    made.exited("c", CRASH, 3.0)
    assert made.gave_up is not None


def test_children_that_were_ready_and_are_killed_from_outside_use_up_nothing() -> None:
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


def test_a_child_that_is_killed_before_it_is_ready_uses_up_the_intensity() -> None:
    made = supervisor("a", intensity=3)
    now, starts = 0.0, made.start(0.0)
    for _ in range(3):
        assert starts == [Start("a")]
        assert made.exited("a", KILLED, now + 10) == []
        now = due(made)
        starts = made.tick(now)
    assert isinstance(made.exited("a", KILLED, now + 10)[0], GiveUp)


def test_deaths_of_one_cause_count_once() -> None:
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


def test_time_in_which_all_stood_still_is_not_taken_for_a_slow_start() -> None:
    made = supervisor(ChildSpec("a", start_deadline=10.0), ChildSpec("b", start_deadline=10.0))
    made.start(0.0)
    made.ready("b", 5.0)
    made.allow_for_pause(100.0)
    assert made.overdue(109.9) == []
    assert made.overdue(110.1) == ["a"]
    assert made.children["b"].since == 5.0


def test_a_start_that_had_to_wait_is_reckoned_from_its_launch() -> None:
    made = supervisor(ChildSpec("a", start_deadline=10.0))
    made.start(0.0)
    made.process_started("a", 50.0)
    assert made.overdue(60.0) == []
    assert made.overdue(60.1) == ["a"]


def test_the_window_stands_still_while_a_child_starts() -> None:
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


def test_a_failed_start_is_a_failure() -> None:
    made = supervisor("a", intensity=2)
    made.start(0.0)
    for at in (1.0, 10.0):
        assert made.exited("a", CRASH, at) == []
        made.tick(at + 5)
    assert isinstance(made.exited("a", CRASH, 20.0)[0], GiveUp)


def test_the_wait_doubles_up_to_the_most_and_jitter_only_shortens_it_to_the_half() -> None:
    backoff = Backoff(0.5, 10.0)
    for seed in range(50):
        source = random.Random(seed)
        for failures, full in ((1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 10.0), (7, 10.0), (10**6, 10.0)):
            assert full / 2 <= backoff.delay(failures, source) <= full
    spread = {backoff.delay(1, random.Random(seed)) for seed in range(50)}
    assert max(spread) - min(spread) > 0.2


def test_failures_in_a_row_wait_ever_longer_for_one_child_and_not_for_another() -> None:
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
def test_a_quiet_period_makes_the_wait_short_again(quiet: float, full: float) -> None:
    made = up(supervisor("a"))
    made.exited("a", CRASH, 5.0)
    made.tick(10.0)
    made.ready("a", 10.0)
    made.exited("a", CRASH, 10.0 + quiet)
    assert full / 2 <= due(made) - (10.0 + quiet) <= full


def test_time_spent_starting_is_not_quiet() -> None:
    made = up(supervisor("a"))
    made.exited("a", CRASH, 5.0)
    made.tick(10.0)
    made.exited("a", CRASH, 10.0 + 10 * PERIOD)
    assert made.children["a"].failures == 2


def test_shutdown_stops_one_after_the_other_in_reverse() -> None:
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


def test_shutdown_stops_a_starting_child_and_forgets_one_that_backs_off() -> None:
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


def test_shutdown_before_the_start_and_of_ended_children_is_at_once() -> None:
    made = supervisor("a")
    assert made.shutdown(0.0) == []
    assert made.ended


def test_a_child_that_crashes_during_shutdown_is_not_started_again() -> None:
    made = up(supervisor("a", "b"))
    made.shutdown(1.0)
    made.exited("b", CRASH, 2.0)
    made.exited("a", CRASH, 2.0)
    assert made.ended
    assert made.gave_up is None
    assert made.restarts == 0


def test_shutdown_in_the_middle_of_a_restart_of_all_ends_all() -> None:
    made = up(supervisor("a", "b", "c", strategy=Strategy.ONE_FOR_ALL))
    assert made.exited("a", CRASH, 1.0) == [Stop("c"), Stop("b")]
    assert made.shutdown(1.1) == []
    assert made.exited("b", DONE, 1.2) == []
    assert made.exited("c", DONE, 1.3) == []
    assert made.ended


def test_a_configuration_error_gives_up_at_once_and_stops_all() -> None:
    made = up(supervisor("a", "b", "c"))
    actions = made.exited("b", CONFIG, 1.0)
    assert actions == [GiveUp("b", CONFIG.reason), Stop("c")]
    assert made.exited("c", DONE, 2.0) == [Stop("a")]
    made.exited("a", DONE, 3.0)
    assert made.ended
    assert made.restarts == 0


def test_a_child_that_starts_for_too_long_is_listed_until_it_is_ready_or_gone() -> None:
    made = supervisor(ChildSpec("a", start_deadline=10.0), ChildSpec("b", start_deadline=10.0), "slow")
    made.start(0.0)
    assert made.overdue(10.0) == []
    made.ready("b", 5.0)
    assert made.overdue(10.1) == ["a"]
    made.exited("a", CRASH, 11.0)
    assert made.overdue(99.0) == []
    made.tick(99.0)
    assert made.overdue(109.0) == []
    assert made.overdue(109.5) == ["a"]


def test_ready_is_heard_from_a_starting_child_only() -> None:
    made = up(supervisor("a"))
    made.shutdown(1.0)
    made.ready("a", 2.0)
    assert made.children["a"].phase is Phase.STOPPING


class SupervisorMachine(RuleBasedStateMachine):
    """Any events, in any order: one process a child at most, and an end after a shutdown."""

    @initialize(
        restarts=st.lists(st.sampled_from(Restart), min_size=1, max_size=4),
        strategy=st.sampled_from(Strategy),
        intensity=st.integers(0, 6),
        seed=st.integers(0, 99),
    )
    def start(self, restarts: list[Restart], strategy: Strategy, intensity: int, seed: int) -> None:
        specs = [ChildSpec(f"c{i}", restart) for i, restart in enumerate(restarts)]
        source = random.Random(seed)
        self.made = Supervisor(specs, strategy, Limits(intensity, PERIOD), Backoff(0.5, 8.0), source)
        self.now = 0.0
        self.alive: set[str] = set()
        self.told: set[str] = set()
        self.carry_out(self.made.start(self.now))

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                assert action.child not in self.alive
                assert not self.made.stopping
                self.alive.add(action.child)
            elif isinstance(action, Stop):
                assert action.child in self.alive - self.told
                self.told.add(action.child)
            else:
                assert self.made.gave_up == action
                assert self.made.stopping

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 10.0, PERIOD, 10 * PERIOD]))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.made.tick(self.now))

    @rule()
    def the_wait_is_over(self) -> None:
        due = self.made.next_due()
        if due is not None:
            self.now = max(self.now, due)
            self.carry_out(self.made.tick(self.now))

    @rule(data=st.data())
    def one_becomes_ready(self, data: st.DataObject) -> None:
        if self.alive:
            self.made.ready(data.draw(st.sampled_from(sorted(self.alive))), self.now)

    @rule(data=st.data(), outcome=st.sampled_from([CRASH, CRASH, CRASH, DONE, CONFIG]))
    def one_dies(self, data: st.DataObject, outcome: Exit) -> None:
        if self.alive:
            self.die(data.draw(st.sampled_from(sorted(self.alive))), outcome)

    @rule(data=st.data())
    def one_obeys(self, data: st.DataObject) -> None:
        if self.told:
            self.die(data.draw(st.sampled_from(sorted(self.told))), DONE)

    @rule(really=st.integers(0, 9))
    def shutdown(self, really: int) -> None:
        if really == 0:
            self.carry_out(self.made.shutdown(self.now))

    def die(self, child: str, outcome: Exit) -> None:
        self.alive.discard(child)
        self.told.discard(child)
        self.carry_out(self.made.exited(child, outcome, self.now))

    @invariant()
    def its_picture_is_true(self) -> None:
        assert {name for name, child in self.made.children.items() if child.alive} == self.alive
        assert {name for name, child in self.made.children.items() if child.phase is Phase.STOPPING} == self.told
        assert self.made.stopping or self.made.gave_up is None

    @invariant()
    def whoever_is_down_is_done_or_waits(self) -> None:
        for child in self.made.children.values():
            assert child.phase is not Phase.DOWN
            if child.phase is Phase.ENDED and not self.made.stopping:
                assert child.spec.restart is not Restart.PERMANENT

    def teardown(self) -> None:
        """After a shutdown everything ends."""
        self.carry_out(self.made.shutdown(self.now))
        for _ in range(10):
            if not self.told:
                break
            self.now += 1.0
            self.die(min(self.told), DONE)
        assert self.alive == set()
        assert self.made.ended


SupervisorMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestSupervisorMachine = SupervisorMachine.TestCase


def test_deaths_that_do_not_count_are_waited_out_without_end() -> None:
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


def test_a_pool_grows_and_shrinks_while_it_runs() -> None:
    made = up(supervisor("a.0", "a.1"))
    assert made.resize([ChildSpec("a.0"), ChildSpec("a.1"), ChildSpec("a.2")], 1.0) == [Start("a.2")]
    made.ready("a.2", 2.0)
    assert made.resize([ChildSpec("a.0")], 3.0) == [Stop("a.1"), Stop("a.2")]
    assert made.exited("a.1", DONE, 4.0) == []
    assert made.exited("a.2", CRASH, 4.0) == []
    assert phases(made) == {"a.0": Phase.READY}
    assert made.restarts == 0


def test_a_child_that_is_wanted_again_while_it_stops_is_started_once_it_is_gone() -> None:
    made = up(supervisor("a.0", "a.1"))
    assert made.resize([ChildSpec("a.0")], 1.0) == [Stop("a.1")]
    assert made.resize([ChildSpec("a.0"), ChildSpec("a.1")], 1.5) == []
    assert made.exited("a.1", DONE, 2.0) == [Start("a.1")]


def test_a_child_that_waits_for_its_restart_leaves_at_once() -> None:
    made = up(supervisor("a.0", "a.1"))
    made.exited("a.1", CRASH, 1.0)
    assert made.resize([ChildSpec("a.0")], 1.0) == []
    assert phases(made) == {"a.0": Phase.READY}
    assert made.tick(1000.0) == []


def test_a_pool_that_ends_is_not_resized() -> None:
    made = up(supervisor("a.0"))
    made.shutdown(1.0)
    assert made.resize([ChildSpec("a.0"), ChildSpec("a.1")], 1.0) == []
