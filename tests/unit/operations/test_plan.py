"""Plans of operations, and their progress, from what nodes and actors report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from relax_actors.config import load_config
from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OperationPlan, OperationRequest
from relax_actors.operations.plan import FIRST_ENGINE, check_role, nodes_of, plan_engine, plan_scale
from relax_actors.operations.progress import Report, next_state
from relax_actors.operations.states import IN, OUT, Operation, State
from relax_actors.roles import role_names, unscalable_roles
from tests.support.running import SUPPORT

EXAMPLES = SUPPORT / "tiny_examples.toml"
READY = {"phase": "ready", "pid": 7, "restarts": 0}
LEASE = {"pid": 7, "weights": 3, "rows": [], "waits_for": "a row with prompt"}


def leases(**nodes: list[str]) -> dict[str, Any]:
    return {
        f"node.{name[1:]}": {"name": name, "since": 1.0, "children": dict.fromkeys(actors, READY)}
        for name, actors in nodes.items()
    }


def planned(request: OperationRequest, **nodes: list[str]) -> OperationPlan:
    return plan_scale(request, nodes_of(leases(**nodes)))


def test_a_target_or_a_delta_names_the_actors_that_start_or_leave() -> None:
    two = ["rollout.0", "rollout.1", "trainer.0"]
    assert planned(OperationRequest("scale", target=4), n0=two).actors == ["rollout.2", "rollout.3"]
    assert planned(OperationRequest("scale", delta=-1), n0=two).actors == ["rollout.1"]
    assert planned(OperationRequest("scale", target=2), n0=two).actors == []
    far = planned(OperationRequest("scale", delta=1, node="n3"), n0=two, n3=["rollout.3000"])
    assert (far.node, far.actors) == (3, ["rollout.3001"])


def test_clients_of_external_engines_do_not_count() -> None:
    plan = planned(OperationRequest("scale", delta=1), n0=["rollout.0", f"rollout.{FIRST_ENGINE}"])
    assert (plan.before, plan.actors) == (1, ["rollout.1"])


def test_the_wanted_number_counts_more_than_actors_that_start_or_leave() -> None:
    nodes = nodes_of(leases(n0=["rollout.0", "rollout.1", "rollout.2"]))
    assert plan_scale(OperationRequest("scale", target=2), nodes, lambda _: 1).actors == ["rollout.1"]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (OperationRequest("scale", delta=-2), "rollout would have 0 actors.*has 2 now.*1 to 999"),
        (OperationRequest("scale", target=1000), "1 to 999"),
        (OperationRequest("scale", "judge", target=1), "judge.*nodes are 0 n0"),
        (OperationRequest("scale", target=1, node="far"), "no node 'far'"),
    ],
)
def test_what_no_node_can_do_is_refused(request_: OperationRequest, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(request_, n0=["rollout.0", "rollout.1"])


def test_a_role_on_several_nodes_needs_a_node() -> None:
    with pytest.raises(ConfigError, match="on no node, or on several"):
        planned(OperationRequest("scale", target=2), n1=["rollout.1000"], n2=["rollout.2000"])


def test_roles_that_own_state_are_not_scaled() -> None:
    with pytest.raises(ConfigError, match="owns state"):
        check_role("trainer", ["rollout", "trainer"], {"trainer": "owns state"})
    with pytest.raises(ConfigError, match=r"no role 'cook'.*rollout, trainer"):
        check_role("cook", ["rollout", "trainer"], {})


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("held_out", "shares \\[examples\\] with examples"),
        ("examples", "shares \\[examples\\] with held_out"),
        ("trainer", "owns state"),
    ],
)
def test_roles_whose_number_is_not_theirs_alone_are_not_scaled(role: str, said: str) -> None:
    config = load_config(EXAMPLES, ["eval.data.kind=python", "eval.data.function=tiny_tasks.make"])
    with pytest.raises(ConfigError, match=said):
        check_role(role, role_names(config), unscalable_roles(config, [role]))
    assert unscalable_roles(config, ["cook"]) == {}


def test_engines_get_the_lowest_free_numbers() -> None:
    node = nodes_of(leases(n0=["rollout.0", f"rollout.{FIRST_ENGINE + 1}"]))[0]
    assert plan_engine(node, []).actors == [f"rollout.{FIRST_ENGINE}"]
    assert plan_engine(node, [f"rollout.{FIRST_ENGINE}"]).actors == [f"rollout.{FIRST_ENGINE + 2}"]


def operation(state: State) -> Operation:
    plan = OperationPlan(0, "n0", 1, 2, ["rollout.1"])
    return Operation(1, OperationRequest("scale", target=2), state, plan)


def report(child: dict[str, Any] | None, lease: dict[str, Any] | None, weights: int = 3) -> Report:
    known = leases(n0=["rollout.0"])
    if child is not None:
        known["node.0"]["children"]["rollout.1"] = child
    return Report(nodes_of(known), {} if lease is None else {"rollout.1": lease}, weights)


@pytest.mark.parametrize("before", OUT[1:-1])
def test_an_actor_that_takes_part_has_reached_every_state(before: State) -> None:
    assert next_state(operation(before), report(READY, LEASE)) is OUT[OUT.index(before) + 1]


@pytest.mark.parametrize(
    ("state", "child", "lease", "weights"),
    [
        (State.CREATING, {"phase": "down", "pid": None}, None, 3),
        (State.CONNECTING, {"phase": "starting", "pid": 7}, None, 3),
        (State.HEALTH_CHECKING, READY, None, 3),
        (State.HEALTH_CHECKING, READY, LEASE | {"pid": 6}, 3),  # of a former process
        (State.WEIGHT_SYNCING, READY, LEASE | {"weights": -1}, 3),
        (State.WEIGHT_SYNCING, READY, {"pid": 7, "rows": []}, 3),
        (State.WEIGHT_SYNCING, READY, LEASE, -1),
        (State.READY, {"phase": "backing_off", "pid": None}, LEASE, 3),
        (State.READY, READY, LEASE | {"waits_for": None}, 3),
    ],
)
def test_an_actor_that_is_not_so_far_holds_the_operation(
    state: State, child: dict[str, Any], lease: dict[str, Any] | None, weights: int
) -> None:
    assert next_state(operation(state), report(child, lease, weights)) is None


def test_actors_have_left_when_their_processes_and_leases_are_gone() -> None:
    draining, removing = operation(State.DRAINING), operation(State.REMOVING)
    assert next_state(draining, report(READY, LEASE)) is None
    assert next_state(draining, report(None, LEASE)) is State.REMOVING
    assert next_state(removing, report(None, LEASE)) is None
    assert next_state(removing, report(None, None)) is IN[-1]
    # The node of `relax up` is restarting: its actors come back with it.
    assert next_state(draining, Report({}, {}, 3)) is None


@pytest.mark.parametrize("state", [State.DRAINING, State.REMOVING])
def test_another_node_with_the_number_of_the_planned_one_holds_no_operation(state: State) -> None:
    plan = OperationPlan(1, "gone", 2, 1, ["rollout.1001"])
    leaving = Operation(1, OperationRequest("scale", target=1), state, plan)
    known = leases(n1=["rollout.1001"]) | {"rollout.1001": LEASE}
    assert next_state(leaving, Report(nodes_of(known), known, 3)) is IN[IN.index(state) + 1]
    known["node.1"]["name"] = "gone"
    assert next_state(leaving, Report(nodes_of(known), known, 3)) is None


def test_node_of_relax_up_may_have_another_name_after_the_run_has_resumed() -> None:
    known = report(None, None)
    assert next_state(operation(State.DRAINING), replace(known, nodes={0: replace(known.nodes[0], name="host2")})) is (
        State.REMOVING
    )
