"""Steps of real runs computed again from their logs: equal bits, planted faults, and nothing written."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.subjects import RowId
from relax_actors.errors import ConfigError
from relax_actors.monitoring.connection import connected
from relax_actors.replay.recording import opened
from relax_actors.replay.steps import Replay, Replayer
from tests.support.kept_runs import (
    KEPT,
    change_cell,
    change_settings,
    copy_of,
    digests_of_files,
    double_first_advantage,
    flip_bit_of_a_log_prob,
    flip_bit_of_a_weight,
)
from tests.support.running import DEADLINE, Run, relax, wait_until

PPO = (
    "critic.learning_rate=1e-3",
    "algorithm.name=ppo",
    "algorithm.kl.place=none",
    "trainer.minibatches=2",
    "trainer.epochs=2",
)
NORM = "model.layers.0.input_layernorm.weight"


def replayed(folder: Path, step: int, name: str = "policy") -> Replay:
    with opened(str(folder)) as recording:
        return Replayer(recording, recording.config, name).replay(step)


@pytest.mark.slow
def test_any_step_of_a_grpo_run_gives_the_recorded_bits_and_changes_nothing(kept_run: Run) -> None:
    before = digests_of_files(kept_run.folder.root)
    for step in random.Random(5).sample(range(8), 3):
        found = replayed(kept_run.folder.root, step)
        assert found.json()["difference"] is None
        assert (found.recorded, found.equal) == (found.computed, True)
        assert found.steps == list(range(3 * (step // 3), step + 1))
        assert {"loss", "grad_norm", "reward"} <= found.figures.keys()
    assert digests_of_files(kept_run.folder.root) == before


@pytest.mark.slow
def test_policy_and_critic_of_a_ppo_run_give_the_recorded_bits(make_run: Callable[..., Run]) -> None:
    run = make_run("ppo", *KEPT, *PPO, "run.steps=6")
    run.complete()
    for step, name in ((4, "policy"), (2, "policy"), (5, "critic"), (1, "critic")):
        found = replayed(run.folder.root, step, name)
        assert found.json()["difference"] is None
        assert (found.recorded, len(found.figures) > 3) == (found.computed, True)


@pytest.mark.slow
def test_command_prints_the_comparison_and_shows_what_a_setting_changes(kept_run: Run) -> None:
    same = relax("replay", "kept", "--step", "4", "--json", "--gradients", cwd=kept_run.cwd, deadline=DEADLINE)
    assert same.returncode == 0, same.stderr
    assert "nanobind" not in same.stderr, "packages that no engine needs write to stderr at the end"
    body = json.loads(same.stdout)
    assert (body["equal"], body["recorded"], body["code"]["equal"]) == (True, body["computed"], True)
    assert all(part["gradients"] for part in body["micro_batches"])
    other = relax("replay", "kept", "--step", "4", "trainer.learning_rate=0.002", cwd=kept_run.cwd, deadline=DEADLINE)
    assert other.returncode == 1, other.stderr
    assert "learning_rate: recorded 0.001, computed 0.002" in other.stdout
    assert "first difference, tensor: model.embed_tokens.weight" in other.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "change"),
    [("advantage", double_first_advantage), ("trajectory", flip_bit_of_a_log_prob)],
    ids=["advantage", "byte"],
)
def test_changed_cell_is_named(kept_run: Run, tmp_path: Path, column: str, change: Callable[[Any], Any]) -> None:
    folder = copy_of(kept_run, tmp_path / "kept")
    change_cell(folder, RowId(4, 2), column, change)
    found = replayed(folder, 5).difference
    assert found is not None
    assert (found.step, found.row, found.column, found.micro_batch) == (4, "group.4.2", column, 0)


@pytest.mark.slow
def test_changed_bit_of_a_weight_is_named_by_its_tensor(kept_run: Run, tmp_path: Path) -> None:
    folder = copy_of(kept_run, tmp_path / "kept")
    flip_bit_of_a_weight(folder / "checkpoints" / "3.1", NORM, seal=True)
    found = replayed(folder, 4).difference
    assert found is not None
    assert (found.step, found.tensor) == (3, NORM)
    flip_bit_of_a_weight(folder / "checkpoints" / "6.1", NORM, seal=False)
    found = replayed(folder, 6).difference
    assert found is not None
    assert "file model" in found.what


@pytest.mark.slow
def test_changed_setting_of_the_loss_is_named_at_its_first_figure_and_tensor(kept_run: Run, tmp_path: Path) -> None:
    folder = copy_of(kept_run, tmp_path / "kept")
    change_settings(folder, lambda config: config["algorithm"].update(aggregate="sample_mean_of_means"))
    found = replayed(folder, 5).difference
    assert found is not None
    assert (found.step, found.figure, found.tensor) == (3, "loss", "model.embed_tokens.weight")
    assert (found.micro_batch, found.rows) == (0, [f"group.3.{index}" for index in range(4)])


@pytest.mark.slow
def test_step_that_was_not_trained_or_not_kept_is_refused_with_the_remedy(kept_run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step 8.*steps 0 to 7"):
        replayed(kept_run.folder.root, 8)
    folder = copy_of(kept_run, tmp_path / "kept")
    for version in (0, 3):
        (folder / "checkpoints" / f"{version}.1").rename(tmp_path / f"lost{version}")
    with pytest.raises(ConfigError, match=r"step 2 of run kept was not kept: .*steps 6 to 7.*run\.keep_steps"):
        replayed(folder, 2)


@pytest.mark.slow
def test_run_that_is_up_is_read_without_a_consumer(kept_run: Run, tmp_path: Path) -> None:
    folder = copy_of(kept_run, tmp_path / "kept")
    with connected(str(folder)) as at:  # its broker is up from here on

        def streams() -> list[tuple[str, int, int, int]]:
            infos = at.table.connection.call(at.table.connection.js.streams_info(), 20)
            states = ((str(i.config.name), i.state) for i in infos if not str(i.config.name).startswith("KV_"))
            return sorted((name, s.messages, s.last_seq, s.consumer_count) for name, s in states)  # leases expire

        before = streams()
        code = subprocess.run(
            [sys.executable, "-m", "relax_actors.cli.main", "replay", str(folder), "--step", "7"],
            capture_output=True,
            timeout=DEADLINE,
            check=False,
        ).returncode
        assert (code, streams()) == (0, before)


@pytest.mark.slow
def test_killed_replay_leaves_nothing_behind(kept_run: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relax_actors.cli.main", "replay", str(kept_run.folder.root), "--step", "7"]
    process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: list(tmp_path.glob("relax-replay-*/broker/address.json")), "copy of the broker", DEADLINE)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: not list(tmp_path.glob("relax-*")), "empty folder", DEADLINE)
    assert replayed(kept_run.folder.root, 7).equal
