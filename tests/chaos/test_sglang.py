"""With SGLang, kills lose no row, and on-policy runs end with the same weights."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.engines.sglang import launch
from relax_actors.engines.sglang.backend import SEGMENTS
from relax_actors.isolation.janitor import segments
from relax_actors.messages import Trajectory
from relax_actors.roles.taught_rollout import is_taught
from tests.support.adapters import base_folder
from tests.support.faults import command_of, story_of, wait_for_cell
from tests.support.judges import chat_judge
from tests.support.kills import kill_actors, kill_at, stopped_root
from tests.support.models import random_model
from tests.support.running import IMAGES, SUPPORT, TINY, Run, processes_of, relax, wait_until
from tests.support.sglang_servers import members, skip_if_missing

skip_if_missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
MakeRun = Callable[..., Run]
SERVED = (
    "rollout.backend=sglang",
    "supervision.intensity=20",
    "supervision.ack_wait=1",
    "supervision.heartbeat=30",
    "supervision.start_deadline=400",
)
ON_POLICY = (*SERVED, "staleness.max=0", "run.deterministic=true", "run.steps=6")
ADAPTER = SUPPORT / "tiny_adapter.toml"
SAMPLED = ("rollout.group_size=4", "rollout.max_tokens=6", "reward.function=tiny_tasks.share_of_sevens")
"""What a run that trains an adapter has besides, to sample its rows."""
TURNS = ("placement.colocate=[['rollout', 'trainer']]", "rollout.sglang.weights=shared")
QUANTISED = (
    *(f"model.architecture.{name}=128" for name in ("hidden_size", "intermediate_size", "head_dim")),
    "model.architecture.num_hidden_layers=1",
    "rollout.sglang.quantization=fp8",
)
LONG = 600.0


def segments_of(run: Run) -> set[Path]:
    """Shared memory segments that the servers of a run use now."""
    used: set[str] = set()
    for pid in processes_of(run.folder.root):
        with contextlib.suppress(ProcessLookupError):
            used |= segments(members(os.getpgid(pid)), SEGMENTS)
    return {Path(path) for path in used}


def record_of(run: Run) -> str:
    """Record of the run's server; empty while there is none."""
    with contextlib.suppress(FileNotFoundError):
        return run.folder.server(0).read_text()
    return ""


def removed(paths: set[Path]) -> bool:
    return not any(path.exists() for path in paths)


def kill_server(run: Run) -> int:
    """SIGKILL the first process of the server, once it exists; return its pid."""

    def find() -> int | None:
        commands = {pid: command_of(pid) for pid in processes_of(run.folder.root)}
        return next((pid for pid, said in commands.items() if launch.__name__ in said and " -I " not in said), None)

    pid = wait_until(find, "server")
    os.kill(pid, signal.SIGKILL)
    return int(pid)


def test_kills_of_server_and_actors_lose_no_row(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("served", *SERVED, "staleness.max=1", "run.steps=12").start()
    wait_for_cell(run, "batch.1", LONG)
    record = run.folder.server(0).read_text()
    run.kill("rollout.0")
    wait_for_cell(run, "batch.3", 200)
    assert run.folder.server(0).read_text() == record  # the server outlived its actor
    used = segments_of(run)
    kill_server(run)
    wait_until(lambda: record_of(run) not in ("", record), "another server", 300)
    wait_for_cell(run, "batch.6", 300)
    used |= segments_of(run)
    assert used
    run.kill("trainer.0")
    run.kill("rollout.0")
    run.disconnect()
    code, result, said = run.finish(LONG)
    assert code == 0, said
    assert (result["trained"], result["in_flight"]) == (4 * 12, 0)
    assert result["admitted"] == result["trained"] + result["dropped"] + result["quarantined"]
    proved = relax("ledger", "served", cwd=tmp_path)
    assert "the ledger is complete" in proved.stdout, proved.stdout + proved.stderr
    story = story_of(run)
    assert story.of("replay_diverged") == story.of("weights_corrupt") == story.of("row_quarantined") == []
    down = [event for event in story.of("crashed") if event["role"] == "server"]
    assert ["SIGKILL" in event["reason"] for event in down] == [True]
    assert processes_of(run.folder.root) == []
    wait_until(lambda: removed(used), "removal of the servers' segments")


@pytest.mark.parametrize(
    ("config", "more"),
    [(TINY, ()), (IMAGES, ()), (ADAPTER, ()), (TINY, TURNS), (TINY, QUANTISED)],
    ids=["text", "images", "adapter", "colocated", "quantised"],
)
def test_on_policy_run_with_killed_server_and_actors_ends_with_the_same_weights(
    make_run: MakeRun, tmp_path: Path, config: Path, more: tuple[str, ...]
) -> None:
    base: tuple[str, ...] = (f"model.path={base_folder(tmp_path)}", *SAMPLED) if config == ADAPTER else ()
    base += more if more == QUANTISED else ()  # the samples of another policy
    alone = make_run("calm", *ON_POLICY, *base, config=config).complete(LONG)["weights_fingerprint"]
    run = make_run("killed", *ON_POLICY, *base, *more, config=config).start()
    wait_for_cell(run, "batch.0", 400)  # the server has started
    kill_actors(run, [("weights.1", "rollout.0")])
    wait_for_cell(run, "weights.2", 200)
    kill_server(run)
    wait_for_cell(run, "batch.4", LONG)  # another server has started
    run.kill("trainer.0")
    run.disconnect()
    code, result, said = run.finish(LONG)
    assert code == 0, said
    assert result["weights_fingerprint"] == alone
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    assert story_of(run).of("replay_diverged") == []


def test_row_is_sampled_again_and_a_killed_replay_leaves_no_server(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("again", *ON_POLICY[:-1], "run.steps=2", "run.keep_steps=9")
    run.complete(LONG)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "relax_actors.cli.main", "replay", str(run.folder.root), "--rollout", "1.2"]
    replay = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(scratch)}, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: any(launch.__name__ in command_of(pid) for pid in processes_of(scratch)), "server", LONG)
    finally:
        replay.kill()
        replay.wait()
    wait_until(lambda: processes_of(scratch) == [], "end of the server", 60)
    wait_until(lambda: list(scratch.glob("relax-replay-*")) == [], "removal of the replay's folder", 60)
    done = relax("replay", "again", "--rollout", "1.2", "--json", cwd=run.cwd, deadline=LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    same = json.loads(done.stdout)
    assert (same["equal"], same["version"], same["samples"]) == (True, 1, 4)
    assert same["tokens"]["recorded"] == same["tokens"]["computed"] > 0
    assert processes_of(run.folder.root) == []


def test_servers_follow_the_scale_and_die_with_the_root(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("scaled", *SERVED, "run.steps=3000").start()
    wait_for_cell(run, "batch.0", 200)
    scaled = relax("scale", "scaled", "rollout=2", cwd=tmp_path)
    assert scaled.returncode == 0, scaled.stdout + scaled.stderr
    wait_until(run.folder.server(1).exists, "second server", 200)
    assert "server.1 ready" in relax("tree", "scaled", cwd=tmp_path).stdout
    relax("scale", "scaled", "rollout=1", cwd=tmp_path)
    wait_until(lambda: not run.folder.server(1).exists(), "end of the second server", 100)
    assert run.folder.server(0).exists()
    used = segments_of(run)
    assert used
    run.disconnect()
    assert run.process is not None
    run.process.kill()
    run.process.communicate()
    wait_until(lambda: processes_of(run.folder.root) == [], "end of all processes")
    wait_until(lambda: removed(used), "removal of the server's segments")


def test_judge_with_a_server_of_its_own_is_killed_and_grades_as_one_in_its_process(
    make_run: MakeRun, tmp_path: Path
) -> None:
    judge = chat_judge(tmp_path / "judge")
    settings = (*SERVED[1:], "staleness.max=0", "run.deterministic=true", "run.steps=3", "trainer.prompts_per_step=2")
    options = f"model = '{judge}', answer = 'reason', max_tokens = 64, deadline = 300"
    reads = 'reward.function={judge = 1.0, "tiny_tasks.share_of_sevens" = 0.5}'
    expected = make_run("calm", *settings, reads, f"roles.judge={{ {options} }}").complete()
    run = make_run("killed", *settings, reads, f"roles.judge={{ {options}, backend = 'sglang' }}").start()
    wait_for_cell(run, "group.1.0.trajectory", LONG)
    run.kill("judge.0")
    run.disconnect()
    code, result, said = run.finish(LONG)
    assert code == 0, said
    assert result["weights_fingerprint"] == expected["weights_fingerprint"]
    assert (result["admitted"], result["trained"]) == (6, 6)
    # A server ends with its actor.
    assert processes_of(run.folder.root) == []
    assert "server.judge.0.log" in [path.name for path in (run.folder.root / "logs").iterdir()]


def test_teacher_with_a_server_of_its_own_writes_the_same_samples_after_kills(
    make_run: MakeRun, tmp_path: Path
) -> None:
    distil = "algorithm.distil={place='loss', kind='forward_kl', top_k=3, student_share=0.5}"
    teacher = f"roles.teacher.model={random_model(tmp_path / 'teacher', 1)}"
    settings = (*ON_POLICY[:-1], "run.steps=4", "trainer.checkpoint_every=9", "algorithm.name=opd", teacher, distil)
    expected = make_run("calm", *settings).complete(LONG)["weights_fingerprint"]
    run = make_run("killed", *settings).start()
    wait_for_cell(run, "batch.0", LONG)
    config, written = run.folder.load_config(), set[bool]()
    with stopped_root(run):
        kill_at(run, "rollout.0", "weights.1")  # the teacher's server ends with its actor
        kill_at(run, "trainer.0", "batch.2")
        for cell_id, cell in run.table.snapshot([run.table.subjects.column("trajectory")]):
            by_teacher = is_taught(config, cell_id.row.step, cell_id.row.index)
            written.add(by_teacher)
            assert by_teacher == (not run.table.read(cell.data, Trajectory).fingerprints)
    assert written == {True, False}
    run.disconnect()
    code, result, said = run.finish(LONG)
    assert code == 0, said
    assert result["weights_fingerprint"] == expected
    assert (result["admitted"], result["trained"]) == (16, 16)
    assert processes_of(run.folder.root) == []
