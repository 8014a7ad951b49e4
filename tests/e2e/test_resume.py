"""`relax up` in a folder that holds a run: finished, stopped, failed at its start, or being removed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from broker.server import Server
from broker.subjects import RowId
from relax_actors.messages import Batch, Reward
from relax_actors.monitoring.connection import connected
from tests.support.faults import is_over, kill_root, story_of, wait_for_cell
from tests.support.messages import assert_says
from tests.support.running import ON_POLICY, TINY, Run, processes_of, relax, settings_of, wait_until

MakeRun = Callable[..., Run]


@pytest.mark.slow
def test_finished_run_is_shown_again_only_with_unchanged_settings(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("done")
    result = run.complete()
    assert result["seconds_to_ready"] < result["seconds_to_first_step"] < result["seconds"]
    again = relax("up", str(TINY), "run.name=done", "supervision.intensity=9", "--json", cwd=tmp_path)
    assert again.returncode == 0
    assert again.stderr.startswith(
        "run done is finished already; nothing was started; its result does not depend on the changed settings\n"
        "  supervision.intensity: 5 -> 9\n"
    )
    assert result["weights_fingerprint"] in again.stdout
    url, secret = "broker.url=nats://me:hunter2@127.0.0.1:9", "roles.eye.api_key=hunter3"
    settings = ("trainer.learning_rate=1e-2", url, "roles.eye.actor=tiny_tasks.Onlooker", secret)
    changed = relax("up", str(TINY), "run.name=done", *settings, cwd=tmp_path)
    assert (changed.returncode, changed.stdout) == (2, "")
    assert_says(
        changed.stderr,
        "run done is finished",
        'broker.url: not set -> "nats://***@127.0.0.1:9"',
        "roles.eye: not set ->",
        "trainer.learning_rate: 0.001 -> 0.01",
        "run.name",
        "--fresh",
        run.folder.root,
    )
    assert "hunter" not in changed.stderr
    assert processes_of(run.folder.root) == []


@pytest.mark.slow
def test_finished_run_goes_on_to_a_larger_number_of_steps(make_run: MakeRun, undisturbed: str) -> None:
    run = make_run("longer", *ON_POLICY)
    code, result, said = run.start("run.steps=4").finish()
    assert (code, result["steps"]) == (0, 4), said
    result = run.complete()
    assert (result["steps"], result["trained"]) == (8, 32)
    assert result["weights_fingerprint"] == undisturbed
    refused = relax("up", str(TINY), "run.name=longer", *ON_POLICY, "run.steps=4", cwd=run.cwd)
    assert refused.returncode == 2
    assert "\n  run.steps: 8 -> 4\n" in refused.stderr


@pytest.mark.slow
def test_changed_settings_of_a_run_that_has_trained_are_accepted_or_refused_by_name(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run("changed", "run.steps=300").start()
    wait_for_cell(run, "batch.0")
    run.end_in_order()
    steps = ("run.name=changed", "run.steps=300")
    settings = ("rollout.group_size=8", "trainer.schedule=linear", "run.steps=12", "rollout.replicas=2")
    refused = relax("up", str(TINY), *steps, *settings, cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        f"relax: run folder {run.folder.root} holds a run with other settings:\n"
        "  rollout.group_size: 4 -> 8\n"
        '  run.steps: 300 -> 12 (trainer.schedule = "linear" decays over run.steps)\n'
        '  trainer.schedule: "constant" -> "linear"\n'
        "Restore them, set another run.name, or start from nothing with --fresh, which removes this run. A run that "
        "has trained can be resumed with changes of: run.steps with a constant schedule, eval.*, an added "
        "[roles.<name>], data.path, model.path, run.folder, run.keep_steps, broker.*, store.*, supervision.*, "
        "prompts.*, *.replicas, "
        "*.deadline, *.memory_limit_mib, *.secrets, *.isolation, *.readable, *.max_processes, media.folders, "
        "media.max_concurrent_rows, media.urls.*, placement.patience, "
        "trainer.checkpoint_every, trainer.keep_checkpoints, trainer.async_checkpoints, weights.transport\n"
    )
    code, result, said = run.start("run.steps=12", "rollout.replicas=2", "trainer.checkpoint_every=5").finish()
    assert (code, result["steps"] >= 12) == (0, True), said
    assert (
        "run changed resumes with changed settings\n  rollout.replicas: 1 -> 2\n  run.steps: 300 -> 12\n"
        "  trainer.checkpoint_every: 3 -> 5\n" in said
    )


@pytest.mark.slow
def test_corrected_configuration_is_accepted_after_a_failed_start(make_run: MakeRun, undisturbed: str) -> None:
    role = "roles.late.actor=tiny_tasks.FailsAfterWeights"
    run = make_run("failed", *ON_POLICY, role)
    wrong = ("supervision.intensity=0", "model.architecture.hidden_size=16", "run.seed=4")
    code, _, said = run.start(*wrong).finish()
    assert code == 1
    assert "supervision gave up: late.0" in said
    # The first weights of the wrong model are published and saved.
    assert (run.folder.checkpoints / "0.1").is_dir()
    code, result, said = run.start("roles.late.works=true").finish()
    assert code == 0, said
    assert (
        "run failed has trained no step yet: it starts from nothing with the new settings\n"
        "  model.architecture.hidden_size: 16 -> 32\n"
        "  roles.late.works: not set -> true\n"
        "  run.seed: 4 -> 3\n"
        "  supervision.intensity: 0 -> 50\n" in said
    )
    assert (result["weights_fingerprint"], result["trained"], result["quarantined"]) == (undisturbed, 32, 0)


@pytest.mark.slow
def test_role_is_added_between_reward_and_advantages_of_rows_in_flight(make_run: MakeRun) -> None:
    run = make_run("added", "run.steps=300").start()
    wait_for_cell(run, "batch.1")
    run.end_in_order()
    run.start("--roles", "prompts,rollout,reward,trainer")
    table = run.table

    def rows_with(column: str) -> set[RowId]:
        return {cell.row for cell in table.list_cells(table.subjects.column(column))}

    def waiting() -> set[RowId] | None:
        """Rows in flight that all have a reward and no advantage."""
        rewarded, lacking = rows_with("reward"), rows_with("reward") - rows_with("advantage")
        return lacking if len(lacking) >= 4 and rows_with("prompt") == rewarded else None

    rows = wait_until(waiting, "rows without advantages", 90)
    rewards = {row: table.fetch(table.subject(row, "reward"), Reward) for row in rows}
    run.end_in_order()
    last = max(row.step for row in rows)
    added = ("roles.shaped.actor=tiny_tasks.Shaped", "advantages.reads=shaped_reward", f"run.steps={last + 3}")
    code, result, said = run.start(*added).finish()
    assert code == 0, said
    assert '  advantages.reads: "reward" -> "shaped_reward"\n  roles.shaped: not set -> {"actor"' in said
    assert (result["trained"], result["dropped"], result["quarantined"]) == ((last + 3) * 4, 0, 0)
    found = relax("ledger", run.name, cwd=run.cwd)
    assert "the ledger is complete" in found.stdout
    batches = {step: value for step, value in _batches(run).items() if step <= last}
    for row in rows:
        assert row.index in batches[row.step].rows
    whole = [step for step in batches if sum(row.step == step for row in rows) == 4]
    assert whole
    for step in whole:
        values = [reward.values for row, reward in rewards.items() if row.step == step and reward is not None]
        assert batches[step].reward == pytest.approx(float(np.mean(values)) / 2, abs=1e-6)


def _batches(run: Run) -> dict[int, Batch]:
    return story_of(run).values("batch")


@pytest.mark.slow
def test_fresh_starts_from_nothing_and_leaves_foreign_files(make_run: MakeRun, undisturbed: str) -> None:
    run = make_run("fresh", *ON_POLICY)
    run.start("run.seed=4").finish()
    (run.folder.root / "notes.txt").write_text("mine")
    code, result, said = run.start("--fresh").finish()
    assert (code, result["weights_fingerprint"], result["admitted"]) == (0, undisturbed, 32), said
    assert (run.folder.root / "notes.txt").read_text() == "mine"
    assert not run.folder.discarded.exists()


@pytest.mark.slow
def test_fresh_is_refused_while_the_run_is_up(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("busy", "run.steps=300").start()
    wait_for_cell(run, "batch.0")
    assert run.process is not None
    refused = relax("up", str(TINY), "run.name=busy", "run.steps=300", "--fresh", cwd=tmp_path)
    assert refused.returncode == 2
    assert_says(refused.stderr, run.folder.root, f"process {run.process.pid}", "run.name")
    wait_for_cell(run, "batch.5")
    run.end_in_order()


@pytest.mark.slow
def test_fresh_removes_a_run_from_an_external_broker_and_store_unless_a_node_is_up(
    make_run: MakeRun, tmp_path: Path, undisturbed: str
) -> None:
    server = Server(tmp_path / "elsewhere")
    address = server.start()
    store = tmp_path / "store"
    run = make_run("guest", *ON_POLICY, *settings_of(address), f"store.path={store}", "supervision.heartbeat=1")
    try:
        run.start("run.seed=4").finish()
        (store / "notes.txt").write_text("mine")
        with connected(str(run.folder.root)) as at:
            lease = at.state.renew_lease("node", 1, {"name": "other", "where": ""}, 60.0)
            at.table.connection.call(lease, 10)
        code, _, said = run.start("--fresh").finish()
        assert (code, said) == (
            2,
            f"relax: run guest is up on broker {address.url}: node.1. Stop its nodes first, or set another run.name\n",
        )
        with connected(str(run.folder.root)) as at:
            at.table.connection.call(at.state.release_lease("node", 1), 10)
        code, result, said = run.start("--fresh").finish()
        assert (code, result["weights_fingerprint"], result["admitted"]) == (0, undisturbed, 32), said
        assert (store / "notes.txt").read_text() == "mine"
    finally:
        server.stop()


@pytest.mark.slow
def test_kill_during_fresh_leaves_nothing_of_the_old_run_in_the_next(make_run: MakeRun, undisturbed: str) -> None:
    run = make_run("halffresh", *ON_POLICY)
    run.start("run.seed=4").finish()
    many = run.folder.root / "store" / "group" / "999"
    many.mkdir(parents=True)
    for n in range(20000):
        (many / f"{n}.safetensors").touch()
    run.start("--fresh")
    wait_until(run.folder.discarded.exists, "removal", 60)
    kill_root(run)
    # It was killed in the middle: the old run is neither whole nor gone.
    assert run.folder.discarded.exists()
    assert not run.folder.config.exists()
    result = run.complete()
    assert (result["weights_fingerprint"], result["admitted"], result["trained"]) == (undisturbed, 32, 32)
    assert not many.exists()
    assert not run.folder.discarded.exists()


@pytest.mark.slow
def test_stopped_run_names_the_command_that_resumes_it(make_run: MakeRun) -> None:
    run = make_run("hinted", "run.steps=300", "data.template={prompt}>").start("--must-finish")
    wait_for_cell(run, "batch.0")
    run.disconnect()
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    code, _, said = run.finish(60)
    assert (code, is_over(run)) == (1, True), said
    command = (
        f"-m relax_actors.cli.main up {TINY} run.name=hinted run.steps=300 'data.template={{prompt}}>' --json "
        "--quiet --must-finish` resumes the run"
    )
    assert command in said
    assert os.access(said.split("`")[1].split()[0], os.X_OK)
