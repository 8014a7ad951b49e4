"""What the autoscaler reads from the leases of nodes, what it may do, and what `relax check` says."""

from __future__ import annotations

from typing import Any

import pytest

from relax_actors.autoscaling.decision import Place, place_for
from relax_actors.config import load_config
from relax_actors.data.checked_run import CheckedRun
from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OperationRequest
from relax_actors.operations import Operation, State
from relax_actors.operations.plan import FIRST_ENGINE
from relax_actors.roles.autoscaler import Autoscaler, Pool, failures_of, pool_of
from relax_actors.roles.permissions import permissions
from tests.support.running import TINY

RUN = ["run.name=demo", "autoscaler.max=4"]


def node(phase: str = "ready", count: int = 1, first: int = 0, **fields: Any) -> dict[str, Any]:
    states = {f"rollout.{first + n}": {"phase": phase, "restarts": 2, "works": True} for n in range(count)}
    return {"name": f"n{first}", "children": {**states, "reward.0": {"phase": "ready", "restarts": 9}}, **fields}


def test_rollouts_that_stop_are_gone_and_those_that_start_are_there() -> None:
    assert pool_of({"node.0": node("starting", 2)}, "") == Pool(2, 0, 4, (Place(0, 2, None, 3),))
    assert pool_of({"node.0": node("stopping")}, "") == Pool(0, 0, 0)


def test_all_nodes_are_scaled_or_the_chosen_one() -> None:
    nodes = {"node.1": node(first=1000, room={"rollout": 3}), "node.2": node(first=2000, count=2)}
    assert pool_of(nodes, "").places == (Place(1, 1, 3, 2), Place(2, 2, None, 3))
    assert [place.node for place in pool_of(nodes, "2").places] == [2]
    assert [place.node for place in pool_of(nodes, "n1000").places] == [1]
    assert pool_of(nodes, "").working == 3
    assert (pool_of(nodes, "").engines, pool_of(nodes, "").least, pool_of(nodes, "1").least) == (3, 2, 3)


@pytest.mark.parametrize(
    ("places", "change", "wanted"),
    [
        ([Place(0, 1, 0), Place(1, 1, 2), Place(2, 1, 3)], 2, (2, 3)),
        ([Place(0, 1, 0), Place(1, 1, 1)], 3, (1, 2)),
        ([Place(0, 1, 0), Place(1, 4, 0)], 1, None),
        ([Place(0, 2, None, 9), Place(1, 2, None, 4)], 1, (1, 3)),
        ([Place(0, 2, None, 4), Place(1, 2, None, 4)], 1, (0, 3)),
        ([Place(0, 1, None, 9), Place(1, 1, 1, 9)], 1, (1, 2)),
        ([Place(0, 2), Place(1, 3), Place(2, 3)], -1, (2, 2)),
        ([Place(0, 2)], -4, (0, 1)),
        ([Place(0, 1), Place(1, 1)], -1, None),
        ([], 1, None),
        ([], -1, None),
    ],
)
def test_rollouts_are_added_where_gpus_are_free_and_taken_where_most_are(
    places: list[Place], change: int, wanted: tuple[int, int] | None
) -> None:
    choice = place_for(places, change)
    assert (None if choice is None else (choice[0].node, choice[1])) == wanted


def test_spot_rollouts_count_while_they_work_and_external_engines_are_not_scaled() -> None:
    found = pool_of({"node.0": node(), "node.1": node(first=1000, spot=True)}, "")
    assert (found.engines, found.spot, len(found.places)) == (1, 1, 1)
    found = pool_of({"node.0": {"children": {f"rollout.{FIRST_ENGINE}": {"phase": "ready"}}}}, "")
    assert (found.engines, found.places) == (1, ())


def test_own_operations_that_failed_since_the_last_success_are_counted() -> None:
    states = [State.ACTIVE, State.FAILED, State.FAILED, State.PENDING]
    own = [Operation(n, OperationRequest("scale", author="autoscaler.0"), state) for n, state in enumerate(states)]
    other = Operation(9, OperationRequest("scale", author="relax scale"), State.ACTIVE)
    assert failures_of([*own, other], "autoscaler.0") == 2
    assert failures_of(own[1:2], "autoscaler.0") == 1
    assert failures_of([other], "autoscaler.0") == 0


@pytest.mark.parametrize("children", [None, [], {"rollout.0": 3}, {"rollout.x": {}, "rollout": {}}])
def test_malformed_leases_count_nothing(children: Any) -> None:
    assert pool_of({"node.0": {"children": children}}, "") == Pool(0, 0, 0)


def test_autoscaler_looks_at_the_rollouts_and_requests_operations_and_no_more() -> None:
    granted = permissions(load_config(TINY, RUN), "autoscaler")
    assert granted.allows("$JS.API.CONSUMER.INFO.RELAX_demo_TABLE.rollout", publish=True)
    assert granted.allows("relax.demo.operation.4", publish=True)
    for subject in (
        "$JS.API.CONSUMER.MSG.NEXT.RELAX_demo_TABLE.rollout",
        "$JS.API.CONSUMER.INFO.RELAX_demo_TABLE.reward",
        "$JS.ACK.RELAX_demo_TABLE.rollout.1.1.1.0.0",
        "relax.demo.group.1.1.trajectory",
        "$KV.RELAX_demo_STATE.run",
    ):
        assert not granted.allows(subject, publish=True), subject


def test_check_says_how_many_rollouts_can_be_busy_and_refuses_more_than_the_bound() -> None:
    config = load_config(TINY, [*RUN, "staleness.max=0"])
    notes = list(Autoscaler().check(CheckedRun(config=config, here=())))
    assert len(notes) == 1
    assert "4 rows are admitted at once" in notes[0]
    many = load_config(TINY, [*RUN, "rollout.replicas=5"])
    with pytest.raises(ConfigError, match=r"above autoscaler\.max"):
        list(Autoscaler().check(CheckedRun(config=many, here=())))


@pytest.mark.parametrize(
    ("setting", "why"), [("autoscaler.min=5", "more than autoscaler.max"), ("autoscaler.replicas=2", "one autoscaler")]
)
def test_impossible_settings_are_refused(setting: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(TINY, [*RUN, setting])
