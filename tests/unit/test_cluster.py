"""Placement of a run on several nodes that exist on paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_actors.checks import examine
from relax_actors.checks.cluster import place_on_nodes, placement_lines
from relax_actors.config import Config, load_config
from relax_actors.data.model_folder import ModelFacts
from relax_actors.devices.cluster import simulated_nodes, spread
from relax_actors.devices.placement import Need
from relax_actors.errors import ConfigError
from relax_actors.roles import roles_at_start
from tests.support.messages import assert_says
from tests.support.running import TINY, relax_here

MEGATRON = (
    "trainer.backend=megatron",
    "trainer.megatron.ranks=8",
    "trainer.megatron.local_ranks=4",
    "trainer.megatron.tensor_parallel=2",
    "rollout.backend=sglang",
    "rollout.replicas=8",
)
LARGE = ModelFacts(4_000_000_000, 40_960, 151_936, "qwen3")


def need(role: str, count: int, gpus: int = 1, *, may_use_cpu: bool = False) -> list[Need]:
    return [Need(actor=f"{role}.{n}", gpus=gpus, may_use_cpu=may_use_cpu) for n in range(count)]


def config_of(*settings: str) -> Config:
    return load_config(TINY, [*MEGATRON, *settings])


def test_actors_fill_one_node_after_the_other_and_ranks_of_other_nodes_leave_out_the_first() -> None:
    needs = [*need("trainer", 1, 4), *need("trainer_rank", 4), *need("rollout", 8)]
    found = spread(needs, simulated_nodes("2x8"), {"trainer_rank"}, 1000)
    assert found.problems == []
    assert found.nodes[0] == ["trainer.0", *(f"rollout.{n}" for n in range(4))]
    assert found.nodes[1] == [
        *(f"trainer_rank.{n}" for n in range(1000, 1004)),
        *(f"rollout.{n}" for n in range(1000, 1004)),
    ]
    assert found.placements[0].gpus["trainer.0"] == (0, 1, 2, 3)
    for placement in found.placements:
        taken = [gpu for gpus in placement.gpus.values() for gpu in gpus]
        assert sorted(taken) == list(range(8))


def test_actors_without_room_are_named_once_for_each_role() -> None:
    found = spread([*need("trainer", 1, 4), *need("rollout", 14)], simulated_nodes("2x8"), (), 1000)
    (problem,) = found.problems
    assert_says(problem, "2 actors of rollout", "1 GPU", "node 0 has 8, node 1 has 8")
    wide = spread(need("rollout", 1, 9), simulated_nodes("2x8"), (), 1000)
    assert_says(wide.problems[0], "1 actor of rollout", "9 GPUs")
    on_cpu = spread(need("reward", 20, may_use_cpu=True), simulated_nodes("2x8"), (), 1000)
    assert on_cpu.problems == []
    assert (len(on_cpu.nodes[0]), len(on_cpu.nodes[1])) == (12, 8)


def test_ranks_of_other_nodes_need_another_node() -> None:
    found = spread(need("trainer_rank", 1), simulated_nodes("1x8"), {"trainer_rank"}, 1000)
    assert_says(found.problems[0], "1 actor of trainer_rank", "1 GPU", "no node")


def test_relax_up_starts_no_rank_of_another_node() -> None:
    config = config_of()
    assert "trainer_rank" not in roles_at_start(config)
    assert config.trainer_rank is not None
    assert config.trainer_rank.replicas == 4
    assert load_config(TINY, ["trainer.backend=megatron", "trainer.megatron.ranks=2"]).trainer_rank is None
    with pytest.raises(ConfigError, match="local_ranks = 4 is more than ranks = 2"):
        config_of("trainer.megatron.ranks=2")


def test_memory_of_each_gpu_is_its_share_of_the_model() -> None:
    placed = {one.actor: one for one in place_on_nodes(config_of(), simulated_nodes("2x8x80GiB"), LARGE).actors}
    trainer, rank = placed["trainer.0"], placed["trainer_rank.1000"]
    # Two ranks share a copy of weights and gradients in float32, all eight the state of AdamW.
    assert rank.device_bytes == pytest.approx(4e9 * (8 / 2 + 8 / 8), rel=0.05)
    assert trainer.device_bytes == pytest.approx(rank.device_bytes, rel=0.2)
    assert placed["prompts.0"].gpus == ()
    assert placed["prompts.0"].device_bytes == 0
    small = place_on_nodes(config_of(), simulated_nodes("2x8x16GiB"), LARGE).problems
    assert any("trainer needs about" in line and "has 16 GiB" in line for line in small)
    assert len(small) == len(set(small))


def test_table_names_node_devices_and_the_commands_that_start_them() -> None:
    nodes = simulated_nodes("2x8x80GiB")
    lines = list(placement_lines(config_of(), nodes, place_on_nodes(config_of(), nodes, LARGE)))
    assert lines[0].split() == ["role", "actor", "node", "devices", "memory"]
    assert any(line.split()[:7] == ["trainer", "trainer.0", "0", "GPUs", "0", "to", "3"] for line in lines)
    assert "relax up rollout.replicas=4" in lines[-2]
    assert "relax node --role=rollout=4 --role=trainer_rank=4" in lines[-1]


@pytest.mark.parametrize("text", ["8", "0x8", "2x", "2x8x80", "x8", "2x8x80GB"])
def test_what_names_no_nodes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--nodes .* write 2x8, or 2x8x80GiB"):
        simulated_nodes(text)


def test_check_prints_the_table_and_what_does_not_fit(tmp_path: Path) -> None:
    ranks = ("trainer.backend=megatron", "trainer.megatron.ranks=12", "trainer.megatron.local_ranks=6")
    done = relax_here("check", str(TINY), *ranks, "--no-calls", "--nodes", "2x8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trainer_rank.1005" in done.stderr
    others, trainer = examine(load_config(TINY, [*ranks]), nodes=simulated_nodes("2x4")).errors
    assert_says(trainer, "1 actor of trainer", "6 GPUs", "node 0 has 4, node 1 has 4")
    assert "trainer_rank with 1 GPU each fit on no node" in others


@pytest.mark.parametrize(("release", "fits"), [("host", True), ("disk", True), ("none", False)])
def test_colocated_actors_that_leave_the_gpu_need_its_memory_one_at_a_time(*, release: str, fits: bool) -> None:
    shared = ["placement.colocate=[['rollout','trainer']]", f"placement.release={release}"]
    config = load_config(TINY, [*shared, "trainer.device=cuda", "rollout.device=cuda"])
    found = place_on_nodes(config, simulated_nodes("1x1x70GiB"), LARGE)
    assert (found.problems == ()) == fits, found.problems
    by_role = {one.role: one for one in found.actors}
    assert by_role["trainer"].device_bytes > 50 << 30
    assert (by_role["trainer"].host_bytes > by_role["trainer"].device_bytes) == (release == "host")


@pytest.mark.parametrize("role", ["trainer", "critic"])
def test_ranks_of_torch_have_a_gpu_each_with_their_share_of_the_model(role: str) -> None:
    critic = ["algorithm.name=ppo", "critic.torch.ranks=4"]
    config = load_config(TINY, ["trainer.torch.ranks=4"] if role == "trainer" else critic)
    placed = place_on_nodes(config, simulated_nodes("1x8"), LARGE)
    (actor,) = [one for one in placed.actors if one.role == role]
    assert len(actor.gpus) == 4
    assert actor.device_bytes == LARGE.parameters * 16 // 4
    assert (
        place_on_nodes(config, simulated_nodes("1x3"), LARGE).problems[0].startswith(f"1 actor of {role} with 4 GPUs")
    )


def test_what_ranks_offload_is_memory_of_the_node() -> None:
    config = load_config(TINY, ["trainer.torch.offload=true", "trainer.torch.ranks=2"])
    placed = place_on_nodes(config, simulated_nodes("1x8"), LARGE)
    (trainer,) = [one for one in placed.actors if one.role == "trainer"]
    assert trainer.device_bytes == 0
    assert trainer.host_bytes > LARGE.parameters * 16
