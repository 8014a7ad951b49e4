"""Lock of a device shared by real processes: one holder at a time, no starvation, released by a killed holder."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_actors.errors import ActorError
from relax_actors.runtime import device_lock
from relax_actors.runtime.device_files import is_held_by, kept_free
from relax_actors.runtime.device_lock import DeviceLock
from tests.support.contexts import MakeContext
from tests.support.running import wait_until

# Takes the lock in a loop, appends its name while holding it, and checks that no other process holds it.
COMPUTE = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from relax_actors.runtime.device_lock import DeviceLock

lock, name, seconds, log = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
around = SimpleNamespace(author=name, progress=lambda: None, journal=None, has_work=lambda: False)
lock_device = DeviceLock([lock], around, 60)
inside = lock.with_suffix(".inside")
out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
while True:
    with lock_device():
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
        os.write(out, name.encode())
        time.sleep(seconds)
        os.unlink(inside)
"""


@contextmanager
def running(program: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stderr is not None
        child.stderr.close()


def computing(folder: Path, name: str, seconds: float) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return running(COMPUTE, str(folder / "0.lock"), name, str(seconds), str(folder / "log"))


def log_of(folder: Path) -> str:
    return (folder / "log").read_text() if (folder / "log").exists() else ""


def test_one_of_three_processes_computes_at_a_time_and_none_starves(tmp_path: Path) -> None:
    with (
        computing(tmp_path, "a", 0.002) as a,
        computing(tmp_path, "b", 0.002) as b,
        computing(tmp_path, "c", 0.02) as c,
    ):
        wait_until(lambda: min(map(log_of(tmp_path).count, "abc")) >= 30, "thirty times each", 60)
        assert [child.poll() for child in (a, b, c)] == [None, None, None]
    log = log_of(tmp_path)
    log = log[max(map(log.index, "abc")) :]
    assert min(map(log.count, "abc")) > len(log) / 10


def test_killed_holder_releases_the_device_at_once(tmp_path: Path, make_context: MakeContext) -> None:
    mine = DeviceLock([tmp_path / "0.lock"], make_context("rollout"), 30.0)
    with computing(tmp_path, "trainer.0#7", 60) as child:
        wait_until(lambda: log_of(tmp_path), "the other process")
        threading.Timer(0.3, child.kill).start()
        with mine():
            assert child.wait() == -9
            assert 0.2 < mine.waited_seconds < 20
            assert mine.holder == "rollout.0#1"
    mine.close()


def test_server_sees_when_its_actor_has_the_device(tmp_path: Path) -> None:
    paths = [tmp_path / "0.lock"]
    assert not is_held_by(paths, "rollout.1")
    with computing(tmp_path, "rollout.1#7", 60):
        wait_until(lambda: is_held_by(paths, "rollout.1"), "turn of the actor")
        assert not is_held_by(paths, "rollout.0")
        assert not is_held_by(paths, "rollout")
    assert not is_held_by(paths, "rollout.1")  # it had the device last, and is gone


def test_device_that_is_kept_free_waits_for_a_server_to_leave_it(tmp_path: Path) -> None:
    paths = [tmp_path / "0.lock"]
    with ExitStack() as stack:
        with kept_free(paths, "server.0"):
            stack.enter_context(computing(tmp_path, "rollout.0#7", 60))
            wait_until(lambda: waits(paths[0]), "the actor that waits for the device")
            assert not is_held_by(paths, "rollout.0")
            assert not log_of(tmp_path)
        wait_until(lambda: log_of(tmp_path), "the turn of the actor")
        with kept_free(paths, "server.0"):
            assert is_held_by(paths, "rollout.0"), "a device in use stays with its holder"


def waits(path: Path) -> bool:
    """Whether an actor waits for a device: it has the second lock."""
    with path.with_suffix(".next").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_long_wait_names_the_holder_counts_as_progress_and_ends_after_patience(
    tmp_path: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lock, "REPORT_SECONDS", 0.1)
    context = make_context("rollout")
    progress: list[None] = []
    context.progress = lambda: progress.append(None)
    mine = DeviceLock([tmp_path / "0.lock"], context, 0.5)
    with computing(tmp_path, "trainer.0#7", 60):
        wait_until(lambda: log_of(tmp_path), "the other process")
        with pytest.raises(ActorError, match=r"device 0 .* trainer.0#7 holds it; raise placement.patience"):
            mine().__enter__()
    assert len(progress) > 10
    subjects = context.table.subjects
    events = wait_until(
        lambda: context.table.connection.call(
            context.table.connection.js.get_last_msg(
                subjects.log_stream, f"{subjects.prefix}.event.rollout.0.waiting_for_device"
            ),
            10,
        ),
        "event",
    )
    assert b'"holder":"trainer.0#7"' in (events.data or b"").replace(b": ", b":")
    # The device is free again, and the waiter released no lock that it did not hold.
    with mine():
        pass
    mine.close()


# Takes turns with an engine that fills the device: two of them there at once are an error. Appends its name at each
# turn and, in capitals, when the engine comes back.
RESIDENT = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from relax_actors.runtime.device_lock import DeviceLock

locks, name, log = sys.argv[1].split(","), sys.argv[2], os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
full = [Path(lock).with_suffix(".full") for lock in locks]

class Engine:
    here = False
    def release_memory(self, folder):
        if self.here:
            for path in full:
                path.unlink()
        self.here = False
        return 3 << 20
    def resume_memory(self):
        if not self.here:
            for path in full:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            os.write(log, name.upper().encode())
        self.here = True
        return 3 << 20

def fail(error):
    raise SystemExit(repr(error))

journal = SimpleNamespace(metric=lambda figures: None)
context = SimpleNamespace(author=name, progress=lambda: None, journal=journal, fail=fail, has_work=lambda: False)
lock_device = DeviceLock([Path(lock) for lock in locks], context, 60)
lock_device.add(Engine())
while True:
    with lock_device():
        with lock_device():
            os.write(log, name.encode())
            time.sleep(0.001)
    time.sleep(0.002)
"""


def resident(folder: Path, name: str, *devices: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
    locks = ",".join(str(folder / f"{device}.lock") for device in devices)
    return running(RESIDENT, locks, name, str(folder / "log"))


def test_memory_stays_on_the_device_while_nobody_waits_and_leaves_it_for_another(tmp_path: Path) -> None:
    with resident(tmp_path, "a", 0) as a:
        wait_until(lambda: log_of(tmp_path).count("a") >= 50, "fifty turns")
        assert log_of(tmp_path).count("A") == 1
        with resident(tmp_path, "b", 0) as b:
            wait_until(lambda: log_of(tmp_path).count("B") >= 10, "ten returns of the other")
            assert (a.poll(), b.poll()) == (None, None)
    assert log_of(tmp_path).count("A") >= 9


def test_idle_holder_hands_the_device_over(tmp_path: Path, make_context: MakeContext) -> None:
    mine = DeviceLock([tmp_path / "0.lock"], make_context("rollout"), 30.0)
    moved: list[str] = []

    def release(_: Path | None) -> int:
        moved.append("out")
        return 5 << 20

    def resume() -> int:
        moved.append("in")
        return 4 << 20

    mine.add(SimpleNamespace(release_memory=release, resume_memory=resume))
    with mine():
        pass
    assert moved == ["out", "in"]
    with resident(tmp_path, "b", 0):
        wait_until(lambda: "b" in log_of(tmp_path), "a turn of the other")
    assert moved == ["out", "in", "out"]
    figures = mine.metrics()
    assert (figures["device_released_mib"], figures["device_resumed_mib"], figures["device_turns"]) == (5, 4, 2)
    mine.close()


class Moves(list[str]):
    """Engine that records when it leaves and returns."""

    def release_memory(self, _: Path | None) -> int:
        self.append("out")
        return 0

    def resume_memory(self) -> int:
        self.append("in")
        return 0


def test_holder_with_work_keeps_the_device_until_it_has_none(tmp_path: Path, make_context: MakeContext) -> None:
    context, moves, rows = make_context("rollout"), Moves(), [None] * 20
    context.has_work = lambda: bool(rows)
    mine = DeviceLock([tmp_path / "0.lock"], context, 30.0, turn=3600.0)
    mine.add(moves)
    with ExitStack() as stack:
        with mine():
            stack.enter_context(resident(tmp_path, "b", 0))
            wait_until(lambda: waits(tmp_path / "0.lock"), "the other actor that waits")
        while rows:
            with mine():
                assert (moves, log_of(tmp_path), mine.is_due()) == (["out", "in"], "", False)
                rows.pop()
        wait_until(lambda: "b" in log_of(tmp_path), "the turn of the other")
    assert moves == ["out", "in", "out"]
    mine.close()


def test_holder_with_work_gives_the_device_up_once_another_has_waited_for_its_time(
    tmp_path: Path, make_context: MakeContext
) -> None:
    context, moves = make_context("rollout"), Moves()
    context.has_work = lambda: True
    mine = DeviceLock([tmp_path / "0.lock"], context, 30.0, turn=0.05)
    mine.add(moves)
    with mine():
        assert not mine.is_due(), "nobody waits"
        with resident(tmp_path, "b", 0):
            wait_until(mine.is_due, "the end of the turn, while it computes")
    with resident(tmp_path, "b", 0):
        wait_until(lambda: "b" in log_of(tmp_path), "the turn of the other")
    assert moves == ["out", "in", "out"]
    mine.close()


def test_patience_is_for_one_holder_and_not_for_all_turns_before_its_own(
    tmp_path: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, looks = tmp_path / "0.lock", 0
    other, mine = (DeviceLock([path], make_context(role), 100.0) for role in ("rollout", "trainer"))

    def look_later(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 8:
            path.write_text("reference.0#1".ljust(80))  # it takes the device after the rollout

    clock = SimpleNamespace(monotonic=lambda: 10.0 * looks, sleep=look_later)
    monkeypatch.setattr(device_lock, "time", clock)
    with other(), pytest.raises(ActorError, match=r"not free for 110 s, reference.0#1 holds it"):
        mine().__enter__()
    assert looks == 8 + 11
    mine.close()
    other.close()


def test_full_disk_is_waited_for_before_another_actor_computes(tmp_path: Path, make_context: MakeContext) -> None:
    context, errors, folders = make_context("rollout"), list[str](), list[Path | None]()
    context.wait_for_room = lambda error: errors.append(str(error))
    mine = DeviceLock([tmp_path / "0.lock"], context, 30.0, folder=tmp_path)

    def release(folder: Path | None) -> int:
        folders.append(folder)
        if len(folders) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return 0

    mine.add(SimpleNamespace(release_memory=release, resume_memory=lambda: 0))
    assert folders == [tmp_path] * 3
    assert len(errors) == 2
    assert f"{tmp_path} has no room" in errors[0]
    assert 'set placement.release = "host"' in errors[0]
    mine.close()


def test_actor_on_two_devices_takes_its_turn_on_both_and_others_share_time(tmp_path: Path) -> None:
    with (
        resident(tmp_path, "a", 0, 1) as wide,
        resident(tmp_path, "b", 0) as left,
        resident(tmp_path, "c", 1) as right,
    ):
        wait_until(lambda: min(map(log_of(tmp_path).count, "ABC")) >= 10, "ten returns each", 60)
        assert [child.poll() for child in (wide, left, right)] == [None, None, None]


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def test_memory_that_becomes_free_late_is_waited_for_and_the_device_is_free_where_it_never_does(
    tmp_path: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = DeviceLock([tmp_path / "0.lock"], make_context("rollout"), 30.0)
    misses = 3

    def resume() -> int:
        nonlocal misses
        misses -= 1
        if misses >= 0:
            raise OutOfMemoryError("CUDA out of memory")
        return 0

    mine.add(SimpleNamespace(release_memory=lambda _: 0, resume_memory=resume))
    with mine():
        assert misses == -1
    other = DeviceLock([tmp_path / "0.lock"], make_context("trainer"), 30.0)
    with other():
        pass
    misses = 1 << 20
    monkeypatch.setattr(device_lock, "ROOM_SECONDS", 0.1)
    for _ in range(2):
        with pytest.raises(ActorError, match=r"rollout.0.* does not fit on device 0 .*out of memory"):
            mine().__enter__()
        with other():
            pass
    mine.close()
    other.close()
