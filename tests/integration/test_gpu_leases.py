"""Actors of a node with GPUs, simulated ones, get GPUs of their own, and keep them when they are killed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_actors.config import load_config
from relax_actors.devices.binding import own_device
from relax_actors.devices.inventory import Gpu, Inventory
from relax_actors.supervision.assignment import whole
from relax_actors.supervision.gpu_leases import GpuLeases, lock_folder, lock_gpu
from relax_actors.supervision.launch import StartError
from tests.support.running import TINY, Run, relax, wait_until

OWN = ["roles.own.actor=tiny_gpus.OnGpus", "roles.own.gpus=2", "roles.none.actor=tiny_gpus.OnNone"]


def seen(run: Run, actor: str, *, other_than: int = 0) -> list[str]:
    """What an actor saw of its GPUs, in a process other than `other_than`."""
    path = run.folder.root / f"{actor}.gpus"

    def read() -> list[str]:
        pid, *found = path.read_text().split("|") if path.exists() else ("0",)
        return found if int(pid) not in (0, other_than) else []

    return wait_until(read, f"GPUs of {actor}", 120)


@pytest.mark.slow
def test_actors_keep_their_gpus_when_they_are_killed_and_the_tree_shows_them(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run("leased", "run.steps=100000", "rollout.replicas=2", *OWN).start("--simulate-gpus", "5")
    assert seen(run, "own.0") == ["", "3,4"]
    assert seen(run, "none.0") == ["", ""]
    wait_until(lambda: run.table.get("relax.leased.batch.0"), "batch.0")
    killed = run.kill("own.0")
    assert seen(run, "own.0", other_than=killed) == ["", "3,4"]
    shown = relax("tree", "leased", cwd=tmp_path).stdout
    assert re.search(r"machine: load \d+\.\d on \d+ cores, .* GiB free, .* GiB of disk free", shown), shown
    places = {
        actor: re.search(rf"{re.escape(actor)} .*?, (GPUs? [\d, to]*\d),", shown)
        for actor in ("trainer.0", "rollout.0", "rollout.1", "own.0")
    }
    assert {actor: found and found[1] for actor, found in places.items()} == {
        "trainer.0": "GPU 0",
        "rollout.0": "GPU 1",
        "rollout.1": "GPU 2",
        "own.0": "GPUs 3, 4",
    }
    refused = relax("scale", "leased", "own=2", cwd=tmp_path)
    assert (refused.returncode, "own.1 needs 2 GPUs" in refused.stderr) == (2, True)
    run.end_in_order()


def test_more_gpus_than_the_node_has_are_refused_before_anything_starts(make_run: Callable[..., Run]) -> None:
    run = make_run("lacking", *OWN, "roles.own.gpus=4")
    code, _, said = run.start("--simulate-gpus", "3x16GiB").finish(60)
    assert code == 2
    assert re.search(r"own\.0 needs 4 GPUs; this node has 3 GPUs .*trainer\.0 has GPU 0, rollout\.0 has GPU 1", said)
    assert not run.folder.address.exists()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Inventory]:
    """Two GPUs that no other test has."""
    gpus = tuple(Gpu(n, "GPU", 1 << 30, f"GPU-{tmp_path.name}-{n}") for n in range(2))
    yield Inventory(gpus)
    for gpu in gpus:
        (lock_folder() / gpu.uuid).unlink(missing_ok=True)


def leases(tmp_path: Path, inventory: Inventory, children: list[str]) -> GpuLeases:
    config = load_config(TINY, [f"run.folder={tmp_path}", "run.name=other", "rollout.replicas=3"])
    return GpuLeases("run", lambda: whole(config), inventory, lambda: children)


def visible(held: GpuLeases, actor: str) -> str:
    return held.environment(actor)["CUDA_VISIBLE_DEVICES"]


def test_a_gpu_of_another_run_is_not_leased_and_an_actor_that_needs_it_waits(tmp_path: Path, two: Inventory) -> None:
    lock, _ = lock_gpu(two.gpus[0], "run first, node 0")
    assert lock is not None
    assert lock_gpu(two.gpus[0], "x") == (None, "is held by run first, node 0")
    held = leases(tmp_path, two, ["trainer.0", "rollout.0"])
    assert visible(held, "trainer.0") == "1"
    with pytest.raises(StartError, match=r"rollout.0 needs 1 GPU; .* GPU 0 .*run first, node 0"):
        held.environment("rollout.0")
    assert held.held() == {"trainer.0": [1]}
    os.close(lock)
    assert visible(held, "rollout.0") == "0"


def test_gpus_of_actors_that_are_gone_are_free_for_others_and_for_other_runs(tmp_path: Path, two: Inventory) -> None:
    children = ["trainer.0", "rollout.0", "rollout.1"]
    held = leases(tmp_path, two, children)
    assert [visible(held, child) for child in children] == ["0", "1", ""]
    children.remove("rollout.0")
    assert visible(held, "rollout.1") == "1"
    assert held.held() == {"trainer.0": [0], "rollout.1": [1]}
    children.remove("rollout.1")
    assert held.held() == {"trainer.0": [0]}, "although no actor has started since"
    lock, _ = lock_gpu(two.gpus[1], "run next")
    assert lock is not None
    os.close(lock)


def test_a_process_counts_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_device("cuda:3") == "cuda:3"
    monkeypatch.setenv("RELAX_GPUS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [own_device(name) for name in ("cuda:3", "cuda", "auto")] == ["cpu", "cpu", "auto"], "simulated"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert [own_device(name) for name in ("cuda:3", "cuda", "auto", "cpu")] == ["cuda", "cuda", "auto", "cpu"]
