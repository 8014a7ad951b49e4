"""Exported traces pass the validators of the programs whose formats they are in: harbor, verifiers and OpenEnv.

These packages need Python 3.12 or later and dependencies of their own: `python3.12 -m venv validators`, then
`validators/bin/pip install harbor verifiers openenv`. RELAX_TRACE_VALIDATORS names the Python of that environment;
without it, this Python and those of the PATH are tried.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from relax_actors.messages import Prompt, Reward, Sample, TokenSequence, Trajectory
from relax_actors.traces import Trace, traces_of
from relax_actors.traces.formats import trace_of
from tests.support.traces import same_trace, write_traces

pytestmark = pytest.mark.slow
PACKAGES = ("harbor", "verifiers", "openenv")

PROGRAMS = {
    "atif": """
from harbor.models.trajectories import Trajectory
for line in lines:
    kept.append(Trajectory.model_validate(line).model_dump(mode="json", exclude_none=True))
""",
    "verifiers": """
from verifiers.v1.trace import WireTrace
for line in lines:
    trace = WireTrace.model_validate(line)
    found.append([[b.token_ids, b.sampled_mask, b.logprobs] for b in trace.branches])
    kept.append(trace.to_record(float_decimals=None))
""",
    "openenv": """
from openenv.core.harness.training import TrainingTrace
for line in lines:
    kept.append(TrainingTrace.model_validate(line).model_dump(mode="json"))
""",
}
"""Programs that read records of a format, and write them again as their own package does."""
FRAME = """
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
kept, found = [], []
{program}
print(json.dumps([kept, found]))
"""


def sequence(kinds: str, player: str = "") -> TokenSequence:
    """Build a sequence: `p` of the prompt or an observation, `t` trained, `s` sampled and not trained."""
    random, whole = np.random.default_rng(len(kinds)), np.array([*kinds])
    return TokenSequence(
        np.arange(1, len(whole) + 1, dtype=np.int32),
        whole == "t",
        np.where(whole == "p", 0, -random.exponential(size=len(whole))).astype(np.float32),
        np.where(whole == "p", -1, 3).astype(np.int32),
        player=player,
    )


def samples() -> list[Trace]:
    """Build traces of a completion, of an episode of several turns, and of one with branches."""
    given = Prompt("sort 31", np.array([1, 2], np.int32), "13", {"level": 2}, 1, 0)
    messages = [{"role": "user", "content": "sort 31"}, {"role": "assistant", "content": "1"}]
    messages += [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "3"}]
    own = [
        Sample((sequence("pptt"),), "13"),
        Sample((sequence("ppttptst"),), "13", messages=messages),
        Sample((sequence("ppttpt"), sequence("ppsspptt")), "1313"),
    ]
    rewards = Reward(np.array([1, 0.5, 0.25], np.float32), {"form": np.array([1, 1, 0.5], np.float32)})
    facts = {"run": "r", "row": "group.0.1", "step": 0, "author": "rollout.0#1"}
    return traces_of(given, Trajectory.of(np.array([1, 2], np.int32), own, {3: "abc"}), rewards, **facts)


@pytest.fixture(scope="module")
def python() -> str:
    """Return a Python with the packages of the three programs."""
    named = os.environ.get("RELAX_TRACE_VALIDATORS")
    newer = [shutil.which(f"python3.{minor}") for minor in range(12, 20)]
    looks = f"import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, {PACKAGES!r})))"
    for path in [named] if named else filter(None, [sys.executable, *newer]):
        if subprocess.run([path, "-c", looks], capture_output=True, check=False).returncode == 0:
            return path
    where = f"RELAX_TRACE_VALIDATORS = {named} lacks" if named else "neither this Python nor one of the PATH has"
    pytest.skip(f"{where} {', '.join(PACKAGES)}, which need Python 3.12 or later; see the head of this file")


@pytest.mark.parametrize("kind", PROGRAMS)
def test_exported_traces_are_valid_and_come_back_from_the_program_with_the_same_bits(
    python: str, kind: str, tmp_path: Path
) -> None:
    traces, path = samples(), tmp_path / "traces.jsonl"
    write_traces(path, kind, traces)
    program = FRAME.format(program=PROGRAMS[kind])
    done = subprocess.run([python, "-c", program, path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kept, found = json.loads(done.stdout.splitlines()[-1])
    for record, trace in zip(kept, traces, strict=True):
        assert same_trace(trace_of(record, "kept"), trace)
    for branches, trace in zip(found, traces if found else [], strict=True):
        assert [ids for ids, _, _ in branches] == [each.token_ids.tolist() for each in trace.sequences]
        assert [mask for _, mask, _ in branches] == [each.loss_mask.tolist() for each in trace.sequences]
        for (_, mask, logprobs), each in zip(branches, trace.sequences, strict=True):
            assert np.array(logprobs, np.float32)[mask].tolist() == each.logprobs[each.loss_mask].tolist()
