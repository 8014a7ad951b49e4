"""Stateful test of the supervisor: any events in any order."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from relax_actors.supervision.spec import Backoff, ChildSpec, Exit, Limits
from relax_actors.supervision.supervisor import Action, Phase, Start, Stop, Supervisor
from tests.support.supervisors import CONFIG, CRASH, DONE, PERIOD


class SupervisorMachine(RuleBasedStateMachine):
    """Any events in any order: at most one process a child, and an end after a shutdown."""

    @initialize(
        children=st.integers(1, 4),
        intensity=st.integers(0, 6),
        seed=st.integers(0, 99),
    )
    def start(self, children: int, intensity: int, seed: int) -> None:
        specs = [ChildSpec(f"c{i}") for i in range(children)]
        source = random.Random(seed)
        self.made = Supervisor(specs, Limits(intensity, PERIOD), Backoff(0.5, 8.0), source)
        self.now = 0.0
        self.alive: set[str] = set()
        self.stop_requested: set[str] = set()
        self.carry_out(self.made.start(self.now))

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                assert action.child not in self.alive
                assert not self.made.stopping
                self.alive.add(action.child)
            elif isinstance(action, Stop):
                assert action.child in self.alive - self.stop_requested
                self.stop_requested.add(action.child)
            else:
                assert self.made.gave_up == action
                assert self.made.stopping

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 10.0, PERIOD, 10 * PERIOD]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.made.tick(self.now))

    @rule()
    def back_off_ends(self) -> None:
        due = self.made.next_due()
        if due is not None:
            self.now = max(self.now, due)
            self.carry_out(self.made.tick(self.now))

    @rule(data=st.data())
    def child_becomes_ready(self, data: st.DataObject) -> None:
        if self.alive:
            self.made.ready(data.draw(st.sampled_from(sorted(self.alive))), self.now)

    @rule(data=st.data(), outcome=st.sampled_from([CRASH, CRASH, CRASH, DONE, CONFIG]))
    def child_dies(self, data: st.DataObject, outcome: Exit) -> None:
        if self.alive:
            self.die(data.draw(st.sampled_from(sorted(self.alive))), outcome)

    @rule(data=st.data())
    def child_stops(self, data: st.DataObject) -> None:
        if self.stop_requested:
            self.die(data.draw(st.sampled_from(sorted(self.stop_requested))), DONE)

    @rule(really=st.integers(0, 9))
    def shutdown(self, really: int) -> None:
        if really == 0:
            self.carry_out(self.made.shutdown(self.now))

    def die(self, child: str, outcome: Exit) -> None:
        self.alive.discard(child)
        self.stop_requested.discard(child)
        self.carry_out(self.made.exited(child, outcome, self.now))

    @invariant()
    def state_matches_the_processes(self) -> None:
        assert {name for name, child in self.made.children.items() if child.alive} == self.alive
        assert {
            name for name, child in self.made.children.items() if child.phase is Phase.STOPPING
        } == self.stop_requested
        assert self.made.stopping or self.made.gave_up is None

    @invariant()
    def children_never_end_before_shutdown(self) -> None:
        for child in self.made.children.values():
            assert child.phase is not Phase.DOWN
            assert child.phase is not Phase.ENDED or self.made.stopping

    def teardown(self) -> None:
        """Check that everything ends after a shutdown."""
        self.carry_out(self.made.shutdown(self.now))
        for _ in range(10):
            if not self.stop_requested:
                break
            self.now += 1.0
            self.die(min(self.stop_requested), DONE)
        assert self.alive == set()
        assert self.made.ended


SupervisorMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


TestSupervisorMachine = SupervisorMachine.TestCase
