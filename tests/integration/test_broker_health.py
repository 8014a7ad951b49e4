"""Health check of the embedded broker: a server that hangs or cannot write is found."""

from __future__ import annotations

import os
import signal
import subprocess
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
from relax_actors.supervision.broker_health import MOST_STARVED, BrokerHealth
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


HEARTBEAT, STEP = 2.0, 4.0


class Machine:
    """What a clock and the kernel say on a machine where requests are `STEP` seconds apart."""

    def __init__(self, *, is_loaded: bool) -> None:
        self.now, self._share = 0.0, 1.0 if is_loaded else 0.0

    def clock(self) -> float:
        self.now += STEP
        return self.now

    def starved(self, _pid: int) -> float:
        """The server waited for its turn since the last request, all the time or not at all."""
        return STEP * self._share

    def health(self, server: Server, address: Address) -> BrokerHealth:
        return BrokerHealth(server, address, HEARTBEAT, 60, lambda _: None, self.starved, self.clock)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, which then answers nobody."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def unanswered(health: BrokerHealth, address: Address, pid: int) -> tuple[int, Verdict]:
    """Return how many requests a silent server was allowed before the verdict, and the verdict."""
    wait_until(lambda: not is_jetstream_ready(address), "a server that does not answer")
    for allowed in range(100):
        if (verdict := health(pid)) is not None:
            return allowed, verdict
    pytest.fail("a server that never answers is not killed")


def test_server_on_a_loaded_machine_is_told_from_a_dead_one(own: tuple[Server, Address]) -> None:
    """Silent for as long, a server that had no turn is spared, and one that could have answered is killed."""
    server, address = own
    assert server.process is not None
    pid = server.process.pid
    machine = Machine(is_loaded=False)
    health = machine.health(server, address)
    assert health(pid) is None
    with stopped(pid):
        allowed, verdict = unanswered(health, address, pid)
        assert allowed <= 1
        assert "no answer for" in verdict.reason
        assert "without processor" not in verdict.reason
        loaded = Machine(is_loaded=True).health(server, address)
        assert loaded(pid) is None
        assert [loaded(pid) for _ in range(allowed + 2)] == [None] * (allowed + 2)
    wait_until(lambda: is_jetstream_ready(address), "answer")


@pytest.mark.slow
def test_server_that_never_gets_a_turn_is_killed_in_the_end(own: tuple[Server, Address]) -> None:
    server, address = own
    assert server.process is not None
    pid = server.process.pid
    health = Machine(is_loaded=True).health(server, address)
    assert health(pid) is None
    with stopped(pid):
        allowed, verdict = unanswered(health, address, pid)
    assert allowed * STEP == pytest.approx(MOST_STARVED * HEARTBEAT, abs=STEP)
    assert "without processor or disk" in verdict.reason
