"""Profiles of a live run: written on demand, without a change of its bits, and forgotten by an actor that is killed."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import story_of
from tests.support.running import DEADLINE, ON_POLICY, Run, relax, wait_until

MANY = (*ON_POLICY, "run.steps=60", "trainer.checkpoint_every=20", "reward.function=tiny_tasks.slow_share_of_sevens")


def profile(run: Run, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "relax_actors.cli.main", "profile", str(run.folder.root), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def names_in(file: str) -> set[str]:
    with gzip.open(file) as trace:
        body: dict[str, Any] = json.load(trace)
    return {event.get("name", "") for event in body["traceEvents"]}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_profiled_run_ends_with_the_same_bits_and_a_killed_actor_goes_on_without_a_profile(
    make_run: Callable[..., Run],
) -> None:
    calm = make_run("calm", *MANY).complete()
    run = make_run("profiled", *MANY).start()
    wait_until(lambda: run.table.get("relax.profiled.batch.0"), "batch.0", 120)
    both = [profile(run, "trainer", "--steps", "2", "--json"), profile(run, "rollout", "--steps", "1")]
    trainer, rollout = (process.communicate(timeout=DEADLINE) for process in both)
    assert [process.returncode for process in both] == [0, 0], (trainer, rollout)
    answer = json.loads(trainer[0])
    assert answer["state"] == "written"
    assert any("Optimizer.step" in name for name in names_in(answer["files"][0]))
    assert any("aten::" in name for name in names_in(rollout[0].strip()))
    waiting = profile(run, "trainer", "--steps", "20")
    assert waiting.stderr is not None
    wait_until(lambda: "20 steps" in waiting.stderr.readline(), "profile", 60)
    run.kill("trainer.0")
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == calm["weights_fingerprint"]
    assert "goes on without a profile" in waiting.communicate(timeout=60)[1]
    assert waiting.returncode == 2
    assert len(story_of(run).of("profiled")) == 2
    check_links(run, [Path(answer["files"][0]).name, Path(rollout[0].strip()).name])


def check_links(run: Run, names: list[str]) -> None:
    """The timeline names the profiles, as instants of their actors and as files."""
    out = run.cwd / "trace.json"
    done = relax("timeline", str(run.folder.root), str(out), cwd=run.cwd)
    assert done.returncode == 0, done.stderr
    assert all(f"{run.folder.profiles / name}" in done.stdout for name in names)
    trace = json.loads(out.read_text())
    assert sorted(trace["otherData"]["profiles"]) == sorted(names)
    shown = [event["args"]["detail"] for event in trace["traceEvents"] if event.get("name") == "profiled"]
    assert sorted(shown) == sorted(names)


@pytest.mark.slow
def test_actors_that_cannot_be_profiled_are_refused_with_the_reason(kept_run: Run) -> None:
    for arguments, reason in (
        (("reward",), "'reward' cannot be profiled; name an actor: trainer, or rollout.N"),
        (("trainer",), "run kept is not up"),
    ):
        done = relax("profile", "kept", *arguments, cwd=kept_run.cwd)
        assert (done.returncode, reason in done.stderr) == (2, True), done.stderr
