"""Rollouts of a node that are killed while they share copies of the weights: the run ends with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.weights.node_sets import FILE
from tests.support.faults import story_of, wait_for_cell
from tests.support.kills import kill_actors
from tests.support.running import ON_POLICY, Run, wait_until

SHARED = (
    *ON_POLICY,
    "rollout.replicas=2",
    "trainer.precision=bfloat16",
    "roles.actor_fwd.replicas=1",
    "algorithm.proximal=actor_fwd",
)


def copies(room: Path) -> dict[str, list[tuple[int, int]]]:
    """Memory that actors hold, by version and fingerprint."""
    held: dict[str, list[tuple[int, int]]] = {}
    for link in room.glob(f"*/*/{FILE}"):
        try:
            status = link.stat()
        except OSError:
            continue
        held.setdefault(link.parent.name.rpartition(".")[0], []).append((status.st_dev, status.st_ino))
    return held


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_rollouts_that_share_a_copy_change_no_bit(make_run: Callable[..., Run]) -> None:
    calm = make_run("calm", *SHARED).complete()["weights_fingerprint"]
    run = make_run("killed", *SHARED).start()
    wait_for_cell(run, "weights.1")
    shared = wait_until(
        lambda: [inodes for inodes in copies(run.folder.weights).values() if len(inodes) == 3], "a copy of three actors"
    )
    assert all(len(set(inodes)) == 1 for inodes in shared)
    kills = [("weights.1", "rollout.0"), ("weights.2", "rollout.1"), ("weights.3", "actor_fwd.0")]
    kill_actors(run, [*kills, ("weights.4", "trainer.0"), ("weights.5", "rollout.0")])
    run.disconnect()
    code, result, said = run.finish()
    assert (code, result["weights_fingerprint"]) == (0, calm), said
    assert (result["trained"], result["quarantined"], result["in_flight"]) == (32, 0, 0)
    assert not story_of(run).of("weights_corrupt")
    assert not list(run.folder.weights.glob("*/*"))
