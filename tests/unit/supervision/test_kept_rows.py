"""Which pools are idle, from the leases of nodes, and for how long before a row counts as kept."""

from __future__ import annotations

from typing import Any

import pytest

from relax_actors.config import load_config
from relax_actors.roles import make_role
from relax_actors.supervision.kept_rows import actors_of, idle_roles, longest_unseen, patience_of
from tests.support.running import TINY


def node(**children: Any) -> dict[str, Any]:
    return {"children": {name.replace("_", "."): state for name, state in children.items()}}


def child(phase: str = "ready", *, works: Any = False) -> dict[str, Any]:
    return {"phase": phase, "works": works}


@pytest.mark.parametrize(
    ("nodes", "idle"),
    [
        ([node(reward_0=child(), rollout_0=child())], {"reward", "rollout"}),
        ([node(reward_0=child(), reward_1=child(works=True))], set()),
        ([node(reward_0=child()), node(reward_1000=child(works=True))], set()),
        ([node(reward_0=child("starting")), node(trainer_0=child())], set()),
        ([node(reward_0=child("starting"), reward_1=child())], set()),
        ([node(reward_0=child("stopping"), reward_1=child())], set()),
        ([node(reward_0=child("ended"), reward_1=child())], {"reward"}),
        ([node(reward_0=child("ended"))], set()),
        ([node(reward_0=child("stopping", works=True), reward_1=child())], set()),
        ([], set()),
        # What another version or a forger writes: nothing is known of such an actor.
        ([node(reward_0={"phase": "ready"}, reward_1=child())], set()),
        ([node(reward_0=child(works=0), reward_1=child())], set()),
        ([{"children": 3}, {}, node(reward_0="x", reward_1=child())], set()),
        ([{"children": 3}, {}, node(reward_1=child())], {"reward"}),
    ],
)
def test_a_pool_is_idle_if_all_its_actors_are_ready_and_known_to_wait(
    nodes: list[dict[str, Any]], idle: set[str]
) -> None:
    leases = {f"node.{n}": lease for n, lease in enumerate(nodes)}
    assert idle_roles(actors_of(leases, ("reward", "rollout"))) == idle


def test_a_row_is_kept_longer_than_redelivery_retries_and_lease_take() -> None:
    config = load_config(TINY, ["supervision.ack_wait=30", "supervision.heartbeat=7", "supervision.max_failures=10"])
    # The retries of a failing row wait for 0.2 to 2 s: 11 s together.
    assert longest_unseen(config, make_role(config, "reward")) == pytest.approx(30 + 7 + 11)


@pytest.mark.parametrize(("ack_wait", "least"), [(1, 60), (30, 4 * 30)])
def test_a_redelivery_is_left_alone_for_much_longer(ack_wait: float, least: float) -> None:
    config = load_config(TINY, [f"supervision.ack_wait={ack_wait}", "supervision.heartbeat=2"])
    patience = patience_of(config, "reward", make_role(config, "reward"))
    assert patience.again >= max(least, 4 * patience.first)
