"""History of a subject, read by pages as an observer of the embedded broker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from broker import history
from broker.client import MAX_HEADER_BYTES
from broker.connection import Connection
from broker.errors import BrokerError
from broker.history import PAGE_MESSAGES, Histories, History
from broker.subjects import RowId, Subjects
from broker.table import Cell
from relax_actors.config import load_config
from relax_actors.monitoring.terminal import Arrivals
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.embedded import Embedded
from tests.support.running import TINY, relax, wait_until

RUN = "remembered"
CONFIG = load_config(TINY, [f"run.name={RUN}"])
SUBJECTS = Subjects(RUN)
READY, STEP = SUBJECTS.event("rollout", 0, "ready"), SUBJECTS.metric("trainer", 0)


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Embedded]:
    """The broker of a run with its streams."""
    found = Embedded(tmp_path / "broker", CONFIG)
    found.start()
    with closing(Connection(found.address("operator"), "root")) as connection:
        connection.call(ensure_run_streams(connection, CONFIG), 30)
    yield found
    found.stop()


@pytest.fixture
def observer(embedded: Embedded) -> Iterator[Connection]:
    with closing(Connection(embedded.address("observer"), "observer")) as connection:
        yield connection


def publish(embedded: Embedded, user: str, *messages: tuple[str, bytes], headers: dict[str, str] | None = None) -> None:
    """Store messages with the credentials of a user."""
    with closing(Connection(embedded.address(user), user)) as connection:

        async def work() -> None:
            for subject, data in messages:
                await connection.js.publish(subject, data, headers=headers)

        connection.call(work(), 20)


def pages_of(connection: Connection, reader: History) -> list[list[Cell]]:
    """Pages up to the first empty one."""
    pages: list[list[Cell]] = []
    while page := connection.call(reader.page(), 20):
        pages.append(page)
    return pages


def test_pages_hold_every_message_of_the_subject_once_in_order(
    embedded: Embedded, observer: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PAGE_MESSAGES", 4)
    for n in range(10):
        publish(embedded, "rollout", (READY, b"%d" % n))
        publish(embedded, "trainer", (STEP, b"%d" % n))
    reader = History(observer, SUBJECTS.log_stream, SUBJECTS.event("*", "*", "*"))
    pages = pages_of(observer, reader)
    assert [len(page) for page in pages] == [4, 4, 2]
    assert [(cell.subject, cell.data) for page in pages for cell in page] == [(READY, b"%d" % n) for n in range(10)]
    publish(embedded, "rollout", (READY, b"new"))
    assert [[cell.data for cell in page] for page in pages_of(observer, reader)] == [[b"new"]]


def test_page_has_a_limit_of_bytes(embedded: Embedded, observer: Connection) -> None:
    large = b"x" * (200 << 10)
    publish(embedded, "rollout", *[(READY, large)] * 12)
    pages = pages_of(observer, History(observer, SUBJECTS.log_stream, READY))
    assert sum(map(len, pages)) == 12
    assert all(sum(len(cell.data) for cell in page) <= history.PAGE_BYTES + len(large) for page in pages)
    assert len(pages) > 1


def test_skipped_history_continues_with_the_next_message(embedded: Embedded, observer: Connection) -> None:
    reader = History(observer, SUBJECTS.log_stream, READY)
    observer.call(reader.skip(), 20)
    publish(embedded, "rollout", (READY, b"first"))
    assert [cell.data for cell in observer.call(reader.page(), 20)] == [b"first"]
    publish(embedded, "rollout", (READY, b"old"))
    reader = History(observer, SUBJECTS.log_stream, READY)
    observer.call(reader.skip(), 20)
    assert observer.call(reader.page(), 20) == []


def test_history_continues_in_a_table_that_was_created_again(embedded: Embedded, observer: Connection) -> None:
    """As `relax up --fresh` does, which deletes the table with its consumers."""
    cells = [SUBJECTS.cell(RowId(0, n), "trajectory") for n in range(5)]
    publish(embedded, "rollout", *((cell, b"old") for cell in cells))
    reader = History(observer, SUBJECTS.table_stream, SUBJECTS.column("trajectory"))
    assert len(pages_of(observer, reader)) == 1
    with closing(Connection(embedded.address("operator"), "root")) as operator:
        operator.call(operator.js.delete_stream(SUBJECTS.table_stream), 10)
        operator.call(ensure_run_streams(operator, CONFIG), 30)
    publish(embedded, "rollout", (cells[3], b"new 0"), (cells[0], b"new 1"))
    assert [[cell.data for cell in page] for page in pages_of(observer, reader)] == [[b"new 0", b"new 1"]]
    publish(embedded, "trainer", (SUBJECTS.numbered("weights", 0), b"new"))
    assert pages_of(observer, reader) == []


def test_headers_that_imitate_the_server_neither_end_a_page_nor_hide_the_rest(
    embedded: Embedded, observer: Connection
) -> None:
    forged = {"Status": "204", "Nats-Sequence": "99", "Nats-Subject": "x", "Nats-Last-Sequence": "99"}
    publish(embedded, "rollout", (READY, b"forged"), headers=forged)
    publish(embedded, "rollout", (READY, b"long"), headers={"x": "y" * (MAX_HEADER_BYTES - 100)})
    publish(embedded, "rollout", (READY, b"last"))
    pages = pages_of(observer, History(observer, SUBJECTS.log_stream, READY))
    assert [(cell.subject, cell.data) for page in pages for cell in page] == [(READY, b"forged"), (READY, b"last")]


def test_user_without_the_permission_is_told_which_one(embedded: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.requests.ANSWER_TIMEOUT", 0.5)
    with closing(Connection(embedded.address("rollout"), "rollout")) as connection:
        subject = f"$JS.API.DIRECT.GET.{SUBJECTS.log_stream}"
        with pytest.raises(BrokerError, match=rf"user '{RUN}\.rollout' has no permission to publish to ") as error:
            connection.call(History(connection, SUBJECTS.log_stream, READY).page(), 30)
        assert subject.lower() in str(error.value).lower()


def test_message_that_another_observer_repeats_is_not_taken_for_a_new_one(
    embedded: Embedded, observer: Connection
) -> None:
    """Observers share an account, so the answer to a request of one reaches the others on the subject that it names."""
    publish(embedded, "trainer", (STEP, b"old"))
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    async def listen() -> None:
        await observer.nc.subscribe(f"{SUBJECTS.prefix}.>", cb=hear)
        await observer.nc.flush(5)

    observer.call(listen(), 20)
    publish(embedded, "trainer", (STEP, b"new"))
    with closing(Connection(embedded.address("observer"), "thief")) as thief:

        async def repeat() -> None:
            for reply in (STEP, SUBJECTS.event("run", 0, "finished")):
                request = json.dumps({"last_by_subj": STEP}).encode()
                await thief.nc.publish(f"$JS.API.DIRECT.GET.{SUBJECTS.log_stream}", request, reply=reply)
                await thief.nc.publish(f"$JS.API.DIRECT.GET.{SUBJECTS.log_stream}", b'{"seq": 1}', reply=reply)
            await thief.nc.flush(5)
            await asyncio.sleep(0)

        thief.call(repeat(), 20)
        wait_until(lambda: len(heard) == 5, "the repeated messages")
    publish(embedded, "trainer", (STEP, b"newest"))
    wait_until(lambda: len(heard) == 6, "the newest message")
    arrivals = Arrivals()
    assert [message.data for message in heard if arrivals.is_next(message)] == [b"new", b"newest"]


def test_tail_reads_a_run_elsewhere_with_the_credentials_of_an_observer(embedded: Embedded, tmp_path: Path) -> None:
    publish(embedded, "rollout", *[(READY, b'{"kind": "ready"}')] * 2)
    address = embedded.address("observer")
    given = ["--broker", address.url, "--credentials", str(address.credentials), "--history", "--count", "2"]
    done = relax("tail", f"relax.{RUN}.event.>", *given, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f'{READY} {{"kind": "ready"}}\n' * 2, "")


def test_several_subjects_are_read_in_order_and_in_parts(embedded: Embedded, observer: Connection) -> None:
    count = 3 * PAGE_MESSAGES
    # A subject with few messages at both ends, and one with many between them.
    publish(embedded, "operator", *[(READY, b"{}")], *[(STEP, b"{}")] * count, *[(READY, b"{}")])
    histories = Histories(observer, SUBJECTS.log_stream, [READY, STEP])
    sizes, sequences = [], []
    while histories.has_more:
        cells = observer.call(histories.news(), 30)
        sizes.append(len(cells))
        sequences += [cell.sequence for cell in cells]
    assert sequences == list(range(1, count + 3))
    assert max(sizes) <= 2 * PAGE_MESSAGES
    assert observer.call(histories.news(), 30) == []
    publish(embedded, "operator", (STEP, b"{}"), (READY, b"{}"))
    assert [cell.subject for cell in observer.call(histories.news(), 30)] == [STEP, READY]
