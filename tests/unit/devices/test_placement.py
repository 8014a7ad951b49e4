"""Placement of actors on GPUs: a pure function."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relax_actors.devices.placement import Need, needs_of_actors, place, shown
from tests.support.messages import assert_says

EIGHT = tuple(range(8))


def actors(role: str, count: int, gpus: int = 1, **settings: object) -> list[Need]:
    need = Need(gpus=gpus, **settings)  # type: ignore[arg-type]
    return needs_of_actors({role: need}, {role: [f"{role}.{n}" for n in range(count)]})


def test_ranks_of_a_trainer_come_first_and_servers_after_them() -> None:
    found = place([*actors("trainer", 1, 4), *actors("rollout", 4)], EIGHT)
    assert found.gpus == {"trainer.0": (0, 1, 2, 3)} | {f"rollout.{n}": (4 + n,) for n in range(4)}
    assert (found.problems, found.on_cpu) == ({}, ())


def test_an_actor_that_is_one_too_many_computes_on_the_cpu_or_is_a_problem() -> None:
    found = place(actors("rollout", 2), (0,))
    assert (found.gpus, found.on_cpu) == ({"rollout.0": (0,)}, ("rollout.1",))
    for settings in ({"may_use_cpu": False}, {"is_required": True}):
        (problem,) = place(actors("rollout", 2, **settings), (0,)).problems.values()
        assert problem.startswith("rollout.1 needs 1 GPU; this node has 1 GPU (GPU 0): rollout.0 has GPU 0.")
        assert "placement.colocate" in problem
        assert "rollout.device" in problem


def test_a_node_without_gpus_serves_all_but_those_that_must_have_some() -> None:
    assert place(actors("trainer", 1, 4, may_use_cpu=False), ()).problems == {}
    (problem,) = place(actors("trainer", 1, is_required=True), ()).problems.values()
    assert problem.startswith("trainer.0 needs 1 GPU; this node has 0 GPUs.")


def test_gpus_that_are_set_are_kept_for_their_actor() -> None:
    needs = [*actors("trainer", 1), *actors("rollout", 2, 2, first=0)]
    assert place(needs, EIGHT).gpus == {"rollout.0": (0, 1), "rollout.1": (2, 3), "trainer.0": (4,)}
    (problem,) = place(actors("trainer", 1, first=9, is_required=True), EIGHT).problems.values()
    assert_says(problem, "number 9", "8 GPUs (GPUs 0 to 7)")


def test_roles_of_a_group_share_its_gpus_and_no_others() -> None:
    needs = [*actors("trainer", 1, 4, group=0), *actors("rollout", 4, group=0), *actors("reference", 1)]
    found = place(needs, EIGHT)
    assert found.gpus["trainer.0"] == (0, 1, 2, 3)
    assert [found.gpus[f"rollout.{n}"] for n in range(4)] == [(0,), (1,), (2,), (3,)]
    assert found.gpus["reference.0"] == (4,)


def test_roles_of_a_group_may_be_set_to_one_gpu() -> None:
    needs = [*actors("trainer", 1, group=0, first=1), *actors("rollout", 1, group=0, first=1)]
    assert place(needs, EIGHT).gpus == {"trainer.0": (1,), "rollout.0": (1,)}


def test_an_actor_waits_for_a_gpu_in_use_and_does_not_compute_on_the_cpu_instead() -> None:
    (problem,) = place(actors("trainer", 1), (0,), taken={0: "is held by run x"}).problems.values()
    assert_says(problem, "1 GPU (GPU 0)", "held by run x")
    found = place(actors("rollout", 3), (0, 1), taken={0: "is in use"})
    assert (found.gpus, found.on_cpu) == ({"rollout.0": (1,)}, ("rollout.2",))
    assert list(found.problems) == ["rollout.1"]


def test_what_actors_hold_stays_theirs_when_others_come_and_go() -> None:
    before = place([*actors("trainer", 1), *actors("rollout", 3)], (0, 1, 2, 3)).gpus
    del before["rollout.1"]
    after = place([*actors("trainer", 1), *actors("rollout", 3)], (0, 1, 2, 3), before)
    assert after.gpus == {"trainer.0": (0,), "rollout.0": (1,), "rollout.1": (2,), "rollout.2": (3,)}
    assert {actor: after.gpus[actor] for actor in before} == before


def test_numbers_are_shown_for_people() -> None:
    assert [shown(gpus) for gpus in ((3,), (0, 1), (4, 5, 6, 7), (0, 2, 3))] == [
        "GPU 3",
        "GPUs 0, 1",
        "GPUs 4 to 7",
        "GPUs 0, 2, 3",
    ]


needs_drawn = st.lists(
    st.builds(
        Need,
        gpus=st.integers(1, 3),
        first=st.none() | st.integers(0, 7),
        group=st.none() | st.integers(0, 1),
        is_required=st.booleans(),
        may_use_cpu=st.booleans(),
    ),
    max_size=6,
)


@given(needs_drawn, st.sets(st.integers(0, 7), max_size=8))
def test_no_gpu_serves_two_actors_of_different_groups_and_every_actor_is_accounted_for(
    drawn: list[Need], present: set[int]
) -> None:
    needs = needs_of_actors(
        {f"r{i}": need for i, need in enumerate(drawn)}, {f"r{i}": [f"r{i}.0", f"r{i}.1"] for i in range(len(drawn))}
    )
    numbers = sorted(present)
    found = place(needs, numbers)
    group = {need.actor: need.group if need.group is not None else need.actor for need in needs}
    for number in numbers:
        assert len({group[actor] for actor, gpus in found.gpus.items() if number in gpus}) <= 1
    for need in needs:
        gpus = found.gpus.get(need.actor, ())
        assert len(gpus) in (0, need.gpus)
        assert set(gpus) <= present
        if numbers:
            assert [bool(gpus), need.actor in found.on_cpu, need.actor in found.problems].count(True) == 1
    assert place(needs, numbers, found.gpus).gpus == found.gpus
