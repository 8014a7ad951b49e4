"""SGLang servers that are killed or hang: samples continue, and nothing of a server is left."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relax_actors.engines.sglang.backend import SEGMENTS
from relax_actors.engines.sglang.weight_loaders import FileLoader
from relax_actors.errors import ActorError
from relax_actors.isolation.janitor import COMMAND, is_janitor, segments
from relax_actors.isolation.proc import command, processes
from relax_actors.weights.node_sets import FILE, MEMORY
from tests.conformance.base.inference_engine import pairs_of
from tests.integration.test_sglang import LONG, REQUESTS, STRINGS, shards
from tests.support.batches import silent
from tests.support.models import STOP, check_logprobs, request_of
from tests.support.running import wait_until
from tests.support.sglang_servers import DENSE, Kept, config_of, engine_of, members, opened_by, skip_if_missing

skip_if_missing()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    kept = Kept(config_of(tmp_path_factory.mktemp("run"), DENSE, run={"deterministic": True}))
    yield kept
    kept.close()


def test_the_next_incarnation_after_a_crash_finds_the_server_with_its_weights(kept: Kept, tmp_path: Path) -> None:
    print_of, (shard,) = shards(kept, tmp_path)
    with engine_of(kept) as engine:
        engine.load(6, print_of, [shard])
    record, log, starts = kept.record, kept.folder.log("server.0"), kept.starts
    script = (
        "import sys, numpy as np, pathlib\n"
        "from relax_actors.engines.protocols import GenerationRequest\n"
        "from relax_actors.engines.sglang.connection import SglangSettings\n"
        "from relax_actors.engines.sglang.engine import SglangEngine\n"
        "from relax_actors.engines.sglang.weight_loaders import FileLoader\n"
        "from relax_actors.engines.protocols.server import ServerRecord\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "find = lambda: ServerRecord.load(path)\n"
        "settings = SglangSettings(512, rows=1, patience=60, stall=60)\n"
        "engine = SglangEngine(find, FileLoader(path.parents[1] / 'weights'), settings)\n"
        "engine.load(6, sys.argv[2], [pathlib.Path(sys.argv[3])])\n"
        "tokens = np.array([1, 2], np.int32)\n"
        "request = GenerationRequest(tokens, 1, 4, 1.0, 1.0, 500, frozenset())\n"
        "engine.generate([request], lambda: print('generating', flush=True))\n"
    )
    command = [sys.executable, "-c", script, str(kept.folder.server(0)), print_of, str(shard)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as life:
        try:
            assert "generating" in line_of(life)
        finally:
            life.kill()
    loads = log.read_text().count("Start update_weights")
    with engine_of(kept) as engine:
        engine.load(6, print_of, [shard])
        made = pairs_of(REQUESTS, engine.generate(REQUESTS, silent))
        check_logprobs(kept.config, made, {6: 1.0}, 1e-5)
    assert kept.record == record
    assert log.read_text().count("Start update_weights") == loads
    assert kept.starts == starts


LOADS = """
import sys, pathlib, httpx
from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.engines.sglang.server import authorization
from relax_actors.engines.sglang.weight_loaders import FileLoader, StagedWeights
from relax_actors.weights import files

path, print_of, shard = map(pathlib.Path, sys.argv[1:])
loader = FileLoader(path.parents[1] / "weights", in_memory=True)
loader.stage(staged := StagedWeights(7, str(print_of)), files.load([shard]))
record, (folder,) = ServerRecord.load(path), (path.parents[1] / "weights").glob("*/7-*")
print("staged", flush=True)
sys.stdin.readline()
body = {"model_path": str(folder), "load_format": "auto", "weight_version": staged.identity}
httpx.post(record.url + "/update_weights_from_disk", json=body, headers=authorization(record), timeout=600)
"""


def test_actor_killed_while_its_server_reads_shared_weights_leaves_nothing(kept: Kept, tmp_path: Path) -> None:
    """Its memory is gone when the server opens it, so the server may end; the next incarnation loads again."""
    print_of, (shard,) = shards(kept, tmp_path)
    path, log, room = kept.folder.server(0), kept.folder.log("server.0"), kept.folder.weights
    with engine_of(kept, FileLoader(room, in_memory=True)) as engine:
        engine.load(6, print_of, [shard])
    schedulers = [pid for pid, title in kept.processes().items() if "scheduler" in title]
    command, loads = [sys.executable, "-c", LOADS, str(path), print_of, str(shard)], "Start update_weights"
    before = log.read_text().count(loads)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as life:
        assert life.stdin is not None
        try:
            assert "staged" in line_of(life)
            for pid in schedulers:
                os.kill(pid, signal.SIGSTOP)
            life.stdin.write("\n")
            life.stdin.flush()
            wait_until(lambda: log.read_text().count(loads) > before, "request in the server")
        finally:
            life.kill()
            life.wait()
            for pid in schedulers:
                os.kill(pid, signal.SIGCONT)
    with engine_of(kept, FileLoader(room, in_memory=True)) as engine:
        engine.load(7, print_of, [shard])
        made = pairs_of(REQUESTS, engine.generate(REQUESTS, silent))
        check_logprobs(kept.config, made, {7: 1.0}, 1e-5)
        assert holders_of_weights(kept) == {os.getpid()}, "a server lets the memory go once it has read it"
    assert holders_of_weights(kept) == set()
    assert not list(room.glob(f"*/*/{FILE}"))


def holders_of_weights(kept: Kept) -> set[int]:
    """Processes of the server, and this one, that have opened or mapped shared weights."""
    return {pid for pid in (os.getpid(), *kept.processes()) if MEMORY in opened_by(pid)}


@pytest.mark.parametrize("part", ["scheduler", "engines.sglang.launch", "supervision.inference_server"])
def test_samples_continue_after_the_server_is_killed(kept: Kept, tmp_path: Path, part: str) -> None:
    with engine_of(kept) as engine:
        engine.load(3, *shards(kept, tmp_path))
        life, is_killed = kept.record.instance, False

        def progress() -> None:
            nonlocal is_killed
            # The samples of a row get their first tokens one after another.
            if not is_killed and all(map(len, engine.rows.samples)):
                is_killed = True
                kept.kill(part)

        made = pairs_of(LONG, engine.generate(LONG, progress))
        assert engine.losses == 1
        assert kept.record.instance != life
        for _, sample in made:
            assert len(sample.tokens) == 450
            assert set(sample.versions) == {3}
        check_logprobs(kept.config, made, {3: 1.0}, 5e-5)


def test_a_hung_server_is_killed_and_restarted(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept, stall=2.0) as engine:
        engine.load(3, *shards(kept, tmp_path))
        grown = 0

        def progress() -> None:
            nonlocal grown
            grown += 1
            if grown == 2:
                (pid,) = [pid for pid, title in kept.processes().items() if "scheduler" in title]
                os.kill(pid, signal.SIGSTOP)

        (group,) = engine.generate(LONG, progress)
        assert [len(sample.tokens) for sample in group] == [450] * 4
        assert engine.losses == 1


def test_without_a_server_the_engine_gives_up_and_blames_no_row(kept: Kept, tmp_path: Path) -> None:
    with (
        engine_of(kept, find=lambda: None, patience=0.5) as engine,
        pytest.raises(ActorError, match="no inference server"),
    ):
        engine.load(3, *shards(kept, tmp_path))


def test_a_deterministic_row_gives_the_same_bits_after_its_server_is_killed(exact: Kept, tmp_path: Path) -> None:
    one = [request_of("12>", 1, samples=6, max_tokens=200, stop_ids=frozenset([STOP]), stop_strings=STRINGS)]
    found = []
    for disturbed in (False, False, True):
        with engine_of(exact, keep_partial=False, rows=1) as engine:
            engine.load(3, *shards(exact, tmp_path))
            killed = False

            def disturb() -> None:
                nonlocal killed
                if not killed:
                    killed = True
                    exact.kill("scheduler")

            (group,) = engine.generate(one, disturb if disturbed else silent)
            found.append(group)
            if not disturbed:
                # A row between the two changes nothing.
                engine.generate([request_of("9081>", 2, samples=8)], silent)
    for group in found[1:]:
        for a, b in zip(found[0], group, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert len({tuple(sample.tokens.tolist()) for sample in found[0]}) == 6


def line_of(process: subprocess.Popen[str], seconds: float = 300.0) -> str:
    """Return the first line that a process prints."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], seconds)[0], f"the process prints no line within {seconds:g} s"
    return process.stdout.readline()


def scratch_of(group: int) -> Path:
    """Temporary folder of a server, which its janitor removes."""
    for pid in processes():
        if is_janitor(pid):
            _, root, _, folder, *_ = command(pid)[len(COMMAND) :]
            if root == str(group).encode():
                return Path(os.fsdecode(folder))
    pytest.fail(f"no janitor of the server of process {group}")


def test_killing_the_supervisor_and_the_keeper_leaves_nothing_of_the_server(tmp_path: Path) -> None:
    config_of(tmp_path / "run", DENSE)
    script = (
        "import json, sys, time, pathlib\n"
        "from tests.support.sglang_servers import Kept\n"
        "from relax_actors.runtime.run_folder import RunFolder\n"
        "kept = Kept(RunFolder(pathlib.Path(sys.argv[1])).load_config())\n"
        "print(json.dumps(kept.record.process_group), flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        try:
            group = json.loads(line_of(supervisor))
            assert len(members(group)) >= 4
            used = {*map(Path, segments(members(group), SEGMENTS)), scratch_of(group)}
            assert len(used) >= 2
            assert all(path.exists() for path in used)
        finally:
            supervisor.kill()
    wait_until(lambda: not members(group), "end of the server")
    wait_until(lambda: not any(path.exists() for path in used), "clean-up")
