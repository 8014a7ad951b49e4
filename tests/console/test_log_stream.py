"""The stream of the log: exact over a killed console and a killed broker, and bounded in cost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.support.consoles import LinkedConsole, ServedConsole, WrittenRun, log_of
from tests.support.running import wait_until


@pytest.fixture
def console(written: WrittenRun) -> Iterator[ServedConsole]:
    console = ServedConsole(written, written.cwd)
    yield console
    console.stop()


class Client(threading.Thread):
    """Reads the stream and reconnects with the last id, as the page does."""

    def __init__(self, console: ServedConsole | LinkedConsole) -> None:
        super().__init__(daemon=True)
        self.sequences: list[int] = []
        self.connections = 0
        self.halt = threading.Event()
        self._console = console

    def run(self) -> None:
        while not self.halt.is_set():
            try:
                last = self.sequences[-1] if self.sequences else 0
                with log_of(self._console.url, self._console.token, last) as messages:
                    self.connections += 1
                    for sequence, _ in messages:
                        self.sequences.append(sequence)
                        if self.halt.is_set():
                            return
            except httpx.HTTPError:
                self.halt.wait(0.1)


@pytest.mark.slow
def test_killed_console_loses_and_doubles_no_message(written: WrittenRun) -> None:
    console = LinkedConsole(written)
    client = Client(console)
    client.start()
    for kills in range(3):
        for n in range(200):
            written.trainer.metric({"rows": n})
        written.train(range(kills, kills + 1))
        if kills < 2:
            wait_until(lambda known=201 * kills: len(client.sequences) > known + 20, "messages")
            console.kill()
    total = 3 * 201
    wait_until(lambda: len(client.sequences) >= total, "all messages")
    client.halt.set()
    console.stop()
    assert client.sequences == list(range(1, total + 1))
    assert client.connections == 3


@pytest.mark.slow
def test_stream_goes_on_after_a_killed_broker(written: WrittenRun, console: ServedConsole) -> None:
    written.train(range(2))
    with log_of(console.url, console.token, 0) as messages:
        first = [next(messages)[0] for _ in range(2)]
        server = written.broker()
        server.kill()
        server.wait(10)
        assert console.get("session")["run"] == written.name
        written.restart_broker()
        written.train(range(2, 3))
        rest = next(messages)[0]
    assert [*first, rest] == [1, 2, 3]
    assert console.get("run")["step"] == 3
