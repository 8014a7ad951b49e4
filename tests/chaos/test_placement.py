"""Placement: the same weights bit for bit in every placement, with kills and without."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.faults import Story, story_of, wait_for_cell
from tests.support.killed_ranks import rank_of
from tests.support.kills import kill_actors, kill_at, stopped_root
from tests.support.running import ON_POLICY, Run, trained_weights, wait_until

MakeRun = Callable[..., Run]
KL = ("algorithm.kl.place=loss", "algorithm.kl.coefficient=0.2", *ON_POLICY)
REFERENCE = ("roles.reference.replicas=1", *KL)
BOTH = (
    "roles.actor_fwd.replicas=1",
    "algorithm.proximal=actor_fwd",
    "algorithm.correction.kind=tis",
    *REFERENCE,
)
COLOCATED = "placement.colocate=[['rollout', 'reference', 'trainer']]"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_hybrid_separate_and_colocated_runs_end_with_the_same_weights(make_run: MakeRun) -> None:
    inside = make_run("inside", *KL)
    expected = trained_weights(inside)
    assert max(metric["kl"] for metric in story_of(inside).metrics if "kl" in metric) > 0
    assert trained_weights(make_run("beside", *REFERENCE)) == expected
    run = make_run("turns", COLOCATED, *REFERENCE)
    assert trained_weights(run) == expected
    # The trainer computes last in a run.
    assert run.folder.device_lock("0").read_text().strip() == "trainer.0#1"
    waited = {m["role"] for m in story_of(run).metrics if "device_wait_seconds" in m}
    assert waited == {"rollout", "reference", "trainer"}
    # On-policy a step takes one turn of each role; those of the start come first.
    turns = [metric["role"] for metric in story_of(run).metrics if metric.get("kind") == "turn"]
    assert max(map(turns.count, waited)) <= 8 + 4, turns


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_of_scoring_roles_and_trainer_do_not_change_the_weights(make_run: MakeRun) -> None:
    expected = trained_weights(make_run("calm", *BOTH))
    run = make_run("killed", COLOCATED, *BOTH).start()
    kills = [
        ("group.0.0.trajectory", "reference.0"),
        ("group.1.1.trajectory", "actor_fwd.0"),
        ("batch.1", "trainer.0"),
        ("group.2.0.prompt", "actor_fwd.0"),
        ("group.3.0.reference", "trainer.0"),
        ("group.4.1.reference", "reference.0"),
        ("weights.5", "rollout.0"),
        ("weights.6", "trainer.0"),
    ]
    kill_actors(run, kills)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == expected
    assert (result["admitted"], result["trained"]) == (32, 32)
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    story = story_of(run)
    assert {e["role"] for e in story.of("crashed")} == {"reference", "actor_fwd", "trainer", "rollout"}
    assert story.of("replay_diverged") == []


def versions(story: Story, role: str) -> set[int]:
    return {int(m["version"]) for m in story.metrics if m["role"] == role and "version" in m}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_off_policy_proximal_log_probs_follow_the_weights_and_the_ledger_adds_up(make_run: MakeRun) -> None:
    run = make_run(
        "stale",
        "staleness.max=2",
        "run.steps=24",
        "roles.actor_fwd.replicas=2",
        "algorithm.proximal=actor_fwd",
        "algorithm.correction.kind=tis",
        "roles.reference.replicas=1",
        "algorithm.kl.place=loss",
        "algorithm.kl.coefficient=0.1",
        "rollout.max_tokens=24",
    ).start()
    wait_for_cell(run, "batch.3")
    with stopped_root(run):
        kill_at(run, "actor_fwd.1", "batch.3")
        ledger = run.ledger()
    assert ledger.violations() == []
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["trained"] == 24 * 4
    assert result["admitted"] == result["trained"] + result["dropped"]
    story = story_of(run)
    steps = story.steps()
    assert len(steps) == 24
    assert max(step["staleness"] for step in steps) >= 1
    # Ratio of the proximal policy to the rollout's, which is older where weights arrived during generation.
    assert any(abs(step["weight"] - 1) > 1e-6 for step in steps)
    assert max(step["kl"] for step in steps) > 0
    assert versions(story, "reference") <= {-1, 0}
    assert max(versions(story, "actor_fwd")) > 0
    assert story.of("row_quarantined") == []


LEAVES = (
    "placement.release=disk",
    "placement.colocate=[['rollout', 'trainer']]",
    "run.steps=12",
    "model.architecture.hidden_size=512",
    "model.architecture.intermediate_size=2048",
    *ON_POLICY,
)
RANKS = "trainer.torch.ranks=2"


def is_writing(run: Run, pid: int) -> bool:
    """Whether a process writes its memory to the disk: a file without a name that is not mapped yet."""
    folder = str(run.folder.device_lock("0").parent)
    opened = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it has been closed
            opened.append(str(path.readlink()))
    written = [path for path in opened if path.startswith(folder) and path.endswith("(deleted)")]
    return bool(written) and any(path not in Path(f"/proc/{pid}/maps").read_text() for path in written)


def kill_while(run: Run, find: Callable[[], int | None], is_at_it: Callable[[int], bool], what: str) -> None:
    """Kill a process at the moment of something that it does again and again."""
    pid = wait_until(find, what)

    def strike() -> bool:
        if not is_at_it(pid):
            return False
        os.kill(pid, signal.SIGSTOP)
        met = is_at_it(pid)
        os.kill(pid, signal.SIGKILL if met else signal.SIGCONT)
        return met

    # Without a pause: what it does takes milliseconds.
    end = time.monotonic() + 60
    while not strike():
        assert time.monotonic() < end, what


def has_device(run: Run, actor: str) -> bool:
    """Whether an actor was the last one to take the device: its memory comes back first."""
    return run.folder.device_lock("0").read_text().startswith(f"{actor}#")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("more", [(), (RANKS,)], ids=["one process", "rank processes"])
def test_kills_while_memory_leaves_and_returns_change_no_bit(make_run: MakeRun, more: tuple[str, ...]) -> None:
    calm = make_run("calm", *LEAVES, *more)
    expected = calm.complete()["weights_fingerprint"]
    turns = [metric for metric in story_of(calm).metrics if metric.get("kind") == "turn"]
    moved = {role: max(m["device_released_mib"] for m in turns if m["role"] == role) for role in ("trainer", "rollout")}
    # The trainer has weights and AdamW's state, all ranks together; the rollout weights in use and the next ones.
    assert moved["trainer"] >= 2 * moved["rollout"] > 0
    assert max(m["device_resumed_mib"] for m in turns if m["role"] == "trainer") == moved["trainer"]
    run = make_run("killed", *LEAVES, *more).start()
    wait_until(partial(run.table.get, "relax.killed.batch.0"), "batch.0", 180)
    memory = partial(rank_of, run, 1) if more else partial(run.pid_of, "trainer.0")
    kill_while(run, memory, partial(is_writing, run), "release of the trainer")
    kill_while(run, partial(run.pid_of, "rollout.0"), partial(is_writing, run), "release of the rollout")
    wait_until(partial(run.table.get, "relax.killed.batch.2"), "batch.2", 180)
    kill_while(run, partial(run.pid_of, "trainer.0"), lambda _: has_device(run, "trainer.0"), "return of the trainer")
    kill_while(run, partial(run.pid_of, "rollout.0"), lambda _: has_device(run, "rollout.0"), "return of the rollout")
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == expected
    assert (result["trained"], result["dropped"], result["quarantined"], result["in_flight"]) == (48, 0, 0, 0)
    assert story_of(run).of("replay_diverged") == []
    assert sorted(path.suffix for path in run.folder.device_lock("0").parent.iterdir()) == [".lock", ".next"]
