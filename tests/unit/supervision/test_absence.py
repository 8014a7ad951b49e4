"""Roles that a run needs and that no node has."""

from __future__ import annotations

from relax_actors.config import load_config
from relax_actors.supervision.absence import RoleAbsence, needed_roles, present_roles
from tests.support.messages import assert_says
from tests.support.running import TINY

ROLLOUT = "nobody writes column trajectory, needed by reward"


def node(*actors: str) -> dict[str, object]:
    return {"children": {actor: {"phase": "backing_off"} for actor in actors}}


def test_every_role_of_the_loop_is_needed_and_an_observer_is_not() -> None:
    shaped = ("roles.shaped.actor=tiny_tasks.Shaped", "advantages.reads=shaped_reward")
    needed = needed_roles(load_config(TINY, ["roles.onlooker.actor=tiny_tasks.Onlooker", *shaped]))
    assert set(needed) == {"prompts", "rollout", "reward", "advantages", "trainer", "shaped"}
    assert needed["shaped"] == "nobody writes column shaped_reward, needed by advantages"
    assert_says(needed["trainer"], "batch", "weights", "checkpoint")


def test_roles_of_any_node_are_present_while_their_actors_restart() -> None:
    assert present_roles([node("rollout.1000", "reward.0"), node("trainer.0"), {"children": 3}, {}]) == {
        "rollout",
        "reward",
        "trainer",
    }


def test_run_ends_when_a_role_is_absent_for_too_long() -> None:
    absence = RoleAbsence({"rollout": ROLLOUT, "reward": "..."}, 60.0)
    for now in range(0, 60, 5):
        absence.observe({"reward"}, float(now))
        assert absence.overdue is None
        assert (absence.notice == "") == (now < 10)
    text = (
        f"role rollout has had no actor on any node for 60 s: {ROLLOUT}. Start one with `relax node --role rollout=1`, "
        "or include rollout in `relax up --roles`. After 60 s (supervision.patience) the run was ended"
    )
    absence.observe({"reward"}, 60.0)
    assert absence.overdue == ("rollout", text)


def test_role_that_comes_back_and_silence_of_the_broker_do_not_count() -> None:
    absence = RoleAbsence({"rollout": ROLLOUT}, 60.0)
    absence.observe(set(), 0.0)
    absence.observe(set(), 50.0)  # the broker did not answer in between
    assert "for 15 s" in absence.notice
    absence.observe({"rollout"}, 51.0)
    assert absence.notice == ""
    absence.observe(set(), 55.0)
    absence.observe(set(), 69.0)
    assert absence.overdue is None
