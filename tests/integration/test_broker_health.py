"""Health check of the embedded broker: a server that hangs or cannot write is found."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nats.errors
import pytest

from broker.address import Address
from broker.connection import Connection
from broker.server import Server, is_jetstream_ready
from broker.streams import ensure_streams, table_spec
from broker.subjects import Subjects
from relax_actors.roles import table_kinds
from relax_actors.runtime.logs import LOG_BYTES, rotate
from relax_actors.supervision.broker_health import BrokerHealth
from relax_actors.supervision.outcome import Verdict
from tests.support.programs import small_file_system
from tests.support.running import wait_until


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[Server, Address]]:
    """Server on its own small file system, where the machine permits one."""
    with small_file_system(tmp_path, "48m"):
        server = Server(tmp_path / "server")
        yield server, server.start()
        server.stop()


def test_hung_server_is_found(own: tuple[Server, Address]) -> None:
    server, address = own
    health = BrokerHealth(server, address, heartbeat=0.5, patience=60, report=lambda _: None)
    assert is_jetstream_ready(address)
    assert server.process is not None
    pid = server.process.pid
    assert health(pid) is None
    os.kill(pid, signal.SIGSTOP)
    verdict = wait_until(lambda: health(pid), "verdict")
    assert isinstance(verdict, Verdict)
    assert "no answer for" in verdict.reason
    assert not verdict.final
    os.kill(server.process.pid, signal.SIGCONT)
    assert is_jetstream_ready(address)
    assert not is_jetstream_ready(Address(address.url))
    other = Server(server.folder.parent / "other").prepare().for_user("operator")
    assert not is_jetstream_ready(Address(address.url, credentials=other.credentials))
    server.stop()
    assert not is_jetstream_ready(address)


def test_server_on_a_full_disk_is_restarted_once_there_is_room(own: tuple[Server, Address]) -> None:
    server, address = own
    if not os.path.ismount(server.folder.parent):
        pytest.skip("a small file system cannot be mounted here")
    said: list[str] = []
    health = BrokerHealth(server, address, heartbeat=10, patience=60, report=said.append)
    connection = Connection(address, "test")
    subjects = Subjects("full")
    connection.call(ensure_streams(connection, [table_spec(subjects, table_kinds(), 1 << 28)]), 20)
    filler = server.folder.parent / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    assert health(0) is None
    with pytest.raises(nats.errors.TimeoutError):
        for step in range(100):
            connection.call(connection.js.publish(f"relax.full.batch.{step}", bytes(4000), timeout=1), 10)
    assert health(0) is None
    assert "0 MiB free; free space" in said[-1]
    impatient = BrokerHealth(server, address, heartbeat=10, patience=-1, report=said.append)
    impatient._read = 0
    last = impatient(0)
    assert last is not None
    assert last.final
    filler.unlink()
    verdict = health(0)
    assert verdict is not None
    assert not verdict.final
    assert "there is room again" in verdict.reason
    assert said[-1] == ""
    connection.close()


def test_failed_write_is_found_in_a_rotated_log(tmp_path: Path) -> None:
    server = Server(tmp_path)
    unreachable = Address("nats://127.0.0.1:1")
    error = b"[ERR] JetStream critical write error: no space left on device\n"

    def health() -> BrokerHealth:
        server.log.write_bytes(b"x\n" * (LOG_BYTES // 2 + 10))
        return BrokerHealth(server, unreachable, heartbeat=60, patience=60, report=lambda _: None)

    examined = health()
    assert examined(0) is None
    rotate(server.log)
    assert examined(0) is None
    server.log.write_bytes(error)
    assert examined(0) is not None
    # The error was logged between the last check and the rotation.
    examined = health()
    with server.log.open("ab") as log:
        log.write(error)
    rotate(server.log)
    assert examined(0) is not None


def test_server_gets_time_to_answer_after_a_pause_of_the_machine(own: tuple[Server, Address]) -> None:
    server, address = own
    health = BrokerHealth(server, address, heartbeat=0.5, patience=60, report=lambda _: None)
    assert server.process is not None
    pid = server.process.pid
    assert health(pid) is None
    os.kill(server.process.pid, signal.SIGSTOP)
    # No check for longer than the heartbeat; the first one after it must not judge.
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(1.0)
    assert health(pid) is None
    os.kill(server.process.pid, signal.SIGCONT)
    assert wait_until(lambda: is_jetstream_ready(address), "answer")
    assert health(pid) is None


GROUPS = {Path("/sys/fs/cgroup/cpu"): "cpu.cfs_quota_us", Path("/sys/fs/cgroup"): "cpu.max"}
"""Folders of control groups that limit the processor, in version 1 and 2, and the file with the limit."""


@contextmanager
def throttled(pid: int) -> Iterator[None]:
    """Give a process a thousandth of a processor, as little as it gets on a machine that is far too busy."""
    parent = next(
        (folder for folder, limit in GROUPS.items() if (folder / limit).exists() or any(folder.glob(f"*/{limit}"))),
        None,
    )
    if parent is None or not os.access(parent, os.W_OK):
        pytest.skip("limiting the processor needs a control group that this user may create")
    group = parent / f"relax-test-{pid}"
    group.mkdir()
    try:
        if (group / "cpu.cfs_period_us").exists():
            (group / "cpu.cfs_period_us").write_text("1000000")
            (group / "cpu.cfs_quota_us").write_text("1000")
        else:
            (group / "cpu.max").write_text("1000 1000000")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(pid))
        wait_until(lambda: not (group / "cgroup.procs").read_text().strip(), "empty control group")
        group.rmdir()


@pytest.mark.slow
def test_server_on_a_loaded_machine_is_told_from_a_dead_one(own: tuple[Server, Address]) -> None:
    server, address = own
    health = BrokerHealth(server, address, heartbeat=2.0, patience=60, report=lambda _: None)
    assert server.process is not None
    pid = server.process.pid
    assert health(pid) is None
    with throttled(pid):
        wait_until(lambda: not is_jetstream_ready(address), "a server without time to answer")
        began = time.monotonic()
        while time.monotonic() - began < 6.0:
            assert health(pid) is None
    assert wait_until(lambda: is_jetstream_ready(address), "answer")
    assert health(pid) is None
    os.kill(pid, signal.SIGSTOP)
    verdict = wait_until(lambda: health(pid), "verdict on a stopped server", 20)
    assert "no answer for" in verdict.reason
    os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_server_that_never_gets_a_turn_is_killed_in_the_end(own: tuple[Server, Address]) -> None:
    server, address = own
    health = BrokerHealth(server, address, heartbeat=0.5, patience=60, report=lambda _: None)
    assert server.process is not None
    pid = server.process.pid
    assert health(pid) is None
    with throttled(pid):
        verdict = wait_until(lambda: health(pid), "verdict", 30)
    assert "without processor or disk" in verdict.reason
