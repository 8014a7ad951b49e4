"""Real zygote: it forks and reports exit codes; a hung one is replaced, and reported exit codes survive it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_actors.supervision.launch import StartError
from relax_actors.supervision.zygote_client import ForkedProcess, Zygote
from tests.support.messages import assert_says
from tests.support.running import wait_until

Make = Callable[..., Zygote]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made = []

    def start(*modules: str, heartbeat: float = 60.0, start_deadline: float = 60.0) -> Zygote:
        environment = os.environ | {"PYTHONPATH": f"{Path.cwd()}:{tmp_path}"}
        zygote = Zygote(
            tmp_path / "zygote.log",
            tmp_path / "zygote.box",
            environment,
            start_deadline=start_deadline,
            heartbeat=heartbeat,
            modules=modules or ("relax_actors.supervision.actor_process",),
        )
        made.append(zygote)
        return zygote

    yield start
    for zygote in made:
        zygote.close()


def fork(zygote: Zygote, folder: Path) -> ForkedProcess:
    """Fork an actor of the run in `folder`."""
    wait_until(zygote.ready, "zygote")
    read, write = os.pipe()
    with (folder / "fork.log").open("ab") as log:
        forked = zygote.fork([str(folder), "reward", "0"], {}, log.fileno(), write)
    os.close(read)
    os.close(write)
    return forked


def waits(folder: Path) -> Path:
    """Create a run whose actors run until they are killed: their configuration is a pipe without a writer."""
    folder.mkdir()
    os.mkfifo(folder / "config.json")
    return folder


def ended(forked: ForkedProcess) -> int:
    wait_until(lambda: forked.poll() is not None, "exit code of the fork")
    assert forked.returncode is not None
    return forked.returncode


def test_fork_ends_with_its_own_exit_code(make: Make, tmp_path: Path) -> None:
    zygote = make()
    forked = fork(zygote, tmp_path)
    assert (ended(forked), forked.cause) == (2, "")
    waiting = fork(zygote, waits(tmp_path / "run"))
    assert waiting.poll() is None
    os.kill(waiting.pid, signal.SIGTERM)
    assert (ended(waiting), waiting.cause) == (-signal.SIGTERM, "")
    assert zygote.state()["phase"] == "ready"


PROBE = """
import json, os, random, sys
import numpy.random
from relax_actors.supervision import actor_process
sys.path.append({folder!r})
try:
    import edited
except ImportError:
    pass
def look(arguments):
    import edited
    kinds = [os.readlink(path) for path in map("/proc/self/fd/{{}}".format, range(256)) if os.path.lexists(path)]
    shared = [kind for kind in kinds if kind.startswith(("socket:", "pipe:"))]
    print(json.dumps([edited.VALUE, sys.argv[1:] == arguments, len(shared), random.random(), numpy.random.random()]))
actor_process.main = look
"""


def test_fork_reads_edited_modules_and_draws_numbers_of_its_own(make: Make, tmp_path: Path) -> None:
    """As a new process does. The folder of the module does not exist when the zygote starts."""
    folder = tmp_path / "code"
    (tmp_path / "probe.py").write_text(PROBE.format(folder=str(folder)))
    zygote = make("probe")
    wait_until(zygote.ready, "zygote")
    folder.mkdir()
    for value in ("1", "22"):
        (folder / "edited.py").write_text(f"VALUE = {value}\n")
        assert ended(fork(zygote, tmp_path)) == 0
    first, second = map(json.loads, (tmp_path / "fork.log").read_text().splitlines())
    assert [first[:3], second[:3]] == [[1, True, 1], [22, True, 1]], "its only pipe is that of its status"
    assert all(a != b for a, b in zip(first[3:], second[3:], strict=True))


def test_garbage_collection_of_a_fork_leaves_out_the_imported_objects(make: Make, tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    (tmp_path / "counted.py").write_text(
        "import gc, os\n"
        "def count():\n"
        f"    with open({str(counts)!r}, 'w') as file:\n"
        "        print(gc.get_freeze_count(), len(gc.get_objects()), file=file)\n"
        "os.register_at_fork(after_in_child=count)\n"
    )
    assert ended(fork(make("relax_actors.supervision.actor_process", "counted"), tmp_path)) == 2
    frozen, collected = map(int, counts.read_text().split())
    assert frozen > 10 * collected


def test_fork_dies_with_its_zygote_and_its_end_is_known_without_the_next_one(make: Make, tmp_path: Path) -> None:
    zygote = make()
    run = waits(tmp_path / "run")
    forked = [fork(zygote, run) for _ in range(2)]
    first = zygote.state()["pid"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: zygote.state()["phase"] == "down", "end of the zygote")
    another = fork(zygote, run)
    assert [(ended(one), one.cause) for one in forked] == [(-signal.SIGKILL, "zygote 1")] * 2
    assert another.poll() is None
    state = zygote.state()
    assert (state["phase"], state["restarts"]) == ("ready", 1)
    assert state["pid"] != first


def test_exit_code_reported_by_a_zygote_survives_its_death(make: Make, tmp_path: Path) -> None:
    zygote = make()
    forked = fork(zygote, tmp_path)
    wait_until(lambda: not Path(f"/proc/{forked.pid}").exists(), "end of the fork")
    # After the next fork the zygote has reported the end of the first.
    fork(zygote, tmp_path)
    os.kill(zygote.state()["pid"], signal.SIGKILL)
    wait_until(lambda: zygote.state()["phase"] == "down", "end of the zygote")
    another = fork(zygote, tmp_path)
    assert (ended(forked), forked.cause) == (2, "")
    assert ended(another) == 2


def test_stopped_zygote_is_killed_and_replaced(make: Make, tmp_path: Path) -> None:
    zygote = make(heartbeat=1.0)
    forked = fork(zygote, waits(tmp_path / "run"))
    first = zygote.state()["pid"]
    os.kill(first, signal.SIGSTOP)
    os.kill(forked.pid, signal.SIGKILL)

    def checked() -> bool:
        zygote.check_health()
        return zygote.state()["pid"] != first

    wait_until(checked, "end of the zygote that was stopped")
    assert (ended(forked), forked.cause) == (-signal.SIGKILL, "zygote 1")
    assert fork(zygote, tmp_path / "run").poll() is None


@pytest.mark.slow
def test_zygote_with_signs_of_life_is_not_killed(make: Make) -> None:
    zygote = make(heartbeat=1.5)
    wait_until(zygote.ready, "zygote")
    first = zygote.state()
    checks = []

    def checked_often() -> bool:
        zygote.check_health()
        checks.append(zygote.state()["pid"])
        return len(checks) >= 250

    wait_until(checked_often, "two heartbeats")
    assert set(checks) == {first["pid"]}


def test_zygote_that_cannot_import_reports_the_reason_and_another_is_started(make: Make, tmp_path: Path) -> None:
    zygote = make("no_such_module")

    def fails() -> StartError | None:
        try:
            zygote.ready()
        except StartError as error:
            return error
        return None

    for life in (1, 2):
        error = wait_until(fails, "end of the zygote")
        assert error.cause == f"zygote {life}"
        assert_says(error, "no_such_module", "exit code 1", tmp_path / "zygote.log")


def test_zygote_that_imports_for_too_long_is_killed(make: Make, tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import signal\nsignal.pause()\n")
    zygote = make("slow_module", start_deadline=1.0)
    assert not zygote.ready()
    assert zygote.state()["phase"] == "importing"

    def checked() -> bool:
        zygote.check_health()
        return zygote.state()["phase"] == "down"

    wait_until(checked, "end of the zygote")
    with pytest.raises(StartError, match=r"slow_module.*not ready within .* s.*raise supervision.start_deadline"):
        zygote.ready()
