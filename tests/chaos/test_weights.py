"""Deltas and the loss scale of float16 do not change the weights, whichever actor is killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_actors.messages import Trajectory, Weights
from tests.support.faults import story_of, wait_for_cell
from tests.support.kills import kill_at, stopped_root
from tests.support.running import ON_POLICY, Run

MakeRun = Callable[..., Run]
SMALL_STEPS = (*ON_POLICY, "trainer.precision=bfloat16", "trainer.learning_rate=1e-5", "weights.full_every=3")
OVERFLOWS = (*ON_POLICY, "trainer.precision=float16", "trainer.loss_scale.initial=8192")
"""The first updates have gradients above the largest number of float16."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_run_with_deltas_and_kills_ends_with_the_weights_of_a_run_without(make_run: MakeRun) -> None:
    full_sets = make_run("whole", *SMALL_STEPS, "weights.delta=off").complete()["weights_fingerprint"]
    run = make_run("deltas", *SMALL_STEPS).start()
    wait_for_cell(run, "weights.2")
    table, served = run.table, dict[int, str]()
    with stopped_root(run):
        kill_at(run, "rollout.0", "weights.2")  # its next incarnation joins late: a full set and deltas
        kill_at(run, "trainer.0", "batch.3")  # its next incarnation has no delta base before its first replayed step
        kill_at(run, "rollout.0", "weights.4")
        kill_at(run, "trainer.0", "weights.6")
        wait_for_cell(run, "weights.8")
        published = {version: table.fetch(table.subjects.numbered("weights", version), Weights) for version in range(9)}
        for _, cell in table.snapshot([table.subjects.column("trajectory")]):
            found = table.read(cell.data, Trajectory)
            assert set(found.fingerprint_by_version) == set(found.versions.tolist())
            served |= found.fingerprint_by_version
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == full_sets
    assert [version for version, cell in published.items() if cell is not None and cell.base_version is not None]
    assert served
    assert served.items() <= {version: cell.fingerprint for version, cell in published.items() if cell}.items()
    story = story_of(run)
    assert story.of("replay_diverged") == story.of("weights_corrupt") == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_run_in_float16_skips_the_same_updates(make_run: MakeRun) -> None:
    undisturbed = make_run("whole", *OVERFLOWS).complete()["weights_fingerprint"]
    run = make_run("killed", *OVERFLOWS).start()
    wait_for_cell(run, "weights.1")
    table = run.table
    with stopped_root(run):
        kill_at(run, "trainer.0", "weights.1")  # whose update was skipped
        kill_at(run, "trainer.0", "batch.5")
        wait_for_cell(run, "weights.8")
        published = [table.fetch(table.subjects.numbered("weights", version), Weights) for version in range(9)]
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == undisturbed
    prints = [cell.fingerprint for cell in published if cell is not None]
    assert prints[0] == prints[1]
    assert prints[0] != prints[-1]
    assert story_of(run).of("replay_diverged") == []
