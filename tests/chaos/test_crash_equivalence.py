"""Whatever is killed, an on-policy run ends with the same weights bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.messages import Trajectory
from tests.chaos.equivalence import cluster_for, compare
from tests.chaos.kill_plan import SERVER, points_of
from tests.chaos.run_kinds import DATA_ROWS, rows_of_data
from tests.support.faults import hit, story_of, wait_for_cell
from tests.support.kept_runs import ENTROPIES, recorded_entropies
from tests.support.kills import kill_actors, kill_at, stopped_root
from tests.support.running import ON_POLICY, Run, relax

MakeRun = Callable[..., Run]


KILLS = (
    ("weights.0", "trainer.0"),  # before the first checkpoint
    ("group.0.0.prompt", "rollout.0"),  # before or in the middle of a generation
    ("batch.1", "trainer.0"),  # in the middle of a step, between batch cell and weights cell
    ("weights.2", "prompts.0"),
    ("group.2.1.reward", "advantages.0"),
    ("group.3.0.trajectory", "reward.0"),
    ("weights.6", "trainer.0"),  # in the middle of a checkpoint
)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("asynchronous", ["false", "true"], ids=["", "asynchronous checkpoints"])
def test_run_with_kills_at_named_points_ends_with_the_same_weights(
    make_run: MakeRun, undisturbed: str, asynchronous: str
) -> None:
    run = make_run("killed", *ON_POLICY, f"trainer.async_checkpoints={asynchronous}").start()
    kill_actors(run, KILLS)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == undisturbed
    assert (result["admitted"], result["trained"]) == (32, 32)
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)


@pytest.mark.slow
def test_recorded_entropies_change_no_bit_of_a_killed_run(make_run: MakeRun, undisturbed: str) -> None:
    calm = make_run("calm", *ON_POLICY, *ENTROPIES)
    assert calm.complete()["weights_fingerprint"] == undisturbed
    run = make_run("entropies", *ON_POLICY, *ENTROPIES).start()
    kill_actors(run, [("group.2.0.prompt", "rollout.0"), ("batch.4", "trainer.0")])
    run.disconnect()
    code, result, said = run.finish()
    assert (code, result["weights_fingerprint"]) == (0, undisturbed), said
    entropies = recorded_entropies(run)
    assert (len(entropies), entropies) == (32, recorded_entropies(calm))
    assert "mean entropy" in relax("samples", run.name, "--step", "7", "--row", "0", cwd=run.cwd).stdout


@pytest.mark.slow
def test_a_crash_of_the_trainer_generates_no_row_again(make_run: MakeRun) -> None:
    run = make_run("once", "staleness.max=2", "supervision.intensity=50", "trainer.checkpoint_every=100").start()
    seen: dict[str, str] = {}
    wait_for_cell(run, "batch.1")
    with stopped_root(run):
        for step in (1, 3):
            kill_at(run, "trainer.0", f"batch.{step}")
            for cell_id, cell in run.table.snapshot([run.table.subjects.column("trajectory")]):
                fingerprints = run.table.read(cell.data, Trajectory).fingerprint_by_version
                found = f"{cell.sequence} {fingerprints}"
                assert seen.setdefault(str(cell_id.row), found) == found
        wait_for_cell(run, "weights.6")
        ledger = run.ledger()
    assert ledger.violations() == []
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["admitted"] == result["trained"] == 32
    story = story_of(run)
    assert story.of("replay_diverged") == []
    assert sum(event["replayed"] for event in story.of("recovered")) >= 2
    # The rollout was not restarted, and its metric counts the rows of its one incarnation.
    assert [event for event in story.of("crashed") if event["role"] != "trainer"] == []
    handled = [metric["rows"] for metric in story.metrics if metric["role"] == "rollout" and "rows" in metric]
    assert 0 < max(handled) <= 32


@pytest.mark.slow
def test_killing_the_node_restarts_its_actors_and_ends_with_the_same_weights(
    make_run: MakeRun, undisturbed: str
) -> None:
    run = make_run("nodekill", *ON_POLICY).start()
    wait_for_cell(run, "batch.2")
    hit(run, "node")
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("algorithm", "seed"), [("grpo", 3), ("updates", 3), ("ppo", 26), ("turns", 9), ("lora", 5)])
def test_thirty_random_kills_over_all_roles_end_with_the_same_weights(
    tmp_path: Path, algorithm: str, seed: int
) -> None:
    text, tally, result, story = compare(tmp_path, kills=32, seed=seed, algorithm=algorithm)
    assert result["alone"] == result["weights_fingerprint"], text
    assert tally.kills >= 30, text
    assert set(tally.by_victim) == set(points_of(algorithm)), text
    met = set(tally.met)
    assert algorithm != "ppo" or "critic.0 in the middle of a step" in met, text
    assert {"trainer.0 in the middle of a step", "rollout.0 in the middle of a generation"} <= met, text
    assert "trainer.0 in the middle of a checkpoint" in met, text
    assert result.get("turns_twice", 0) == 0, text
    assert sum(event["replayed"] for event in story.of("recovered")) > 0, text
    assert story.of("replay_diverged") == []
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    assert result["trained"] == result["admitted"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("algorithm", "kills", "seed"), [("sft", 30, 57), ("dpo", 30, 135), ("reward_model", 30, 80), ("dpo", 10, 273)]
)
def test_random_kills_of_runs_on_rows_of_data_end_with_the_same_weights(
    tmp_path: Path, algorithm: str, kills: int, seed: int
) -> None:
    text, tally, result, story = compare(tmp_path, kills, seed, algorithm=algorithm)
    assert result["alone"] == result["weights_fingerprint"], text
    assert tally.kills >= kills, text
    assert set(tally.by_victim) == set(points_of(algorithm)), text
    assert story.of("replay_diverged") == []
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    epochs = result["trained"] // DATA_ROWS
    assert rows_of_data(story) == dict.fromkeys(range(DATA_ROWS), epochs), text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weights_are_the_same_after_kills_of_actors_and_servers_of_a_cluster_with_accounts(tmp_path: Path) -> None:
    with cluster_for("killed", tmp_path) as cluster:
        report, tally, result, story = compare(tmp_path, 12, 2, cluster=cluster)
    assert result["alone"] == result["weights_fingerprint"], report
    assert tally.by_victim[SERVER] >= 2, report
    assert story.strays() == []
    assert result["trained"] == result["admitted"] == 4 * result["steps"]
