"""The publisher on a real server: acknowledgements, refusals and silence."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.js.errors import APIError, NoStreamResponseError

from broker.connection import Connection
from broker.pull import Delivery, delivery_of
from broker.server import Server
from broker.store import Store
from broker.streams import ensure_streams, table_spec
from broker.subjects import RowId, Subjects
from broker.table import Table, publish
from relax_actors.messages import Dropped
from relax_actors.roles import table_kinds


def publish_all(connection: Connection, subjects: list[str]) -> list[dict[str, object] | BaseException]:
    async def work() -> list[dict[str, object] | BaseException]:
        answers = [await publish(connection.requests, subject, b"x") for subject in subjects]
        return await asyncio.gather(*answers, return_exceptions=True)

    return connection.call(work(), 30)


def test_each_message_gets_its_own_answer(table: Table) -> None:
    subjects = [table.subject(RowId(0, index % 60), "dropped") for index in range(120)]
    answers = publish_all(table.connection, subjects)
    assert [answer["seq"] for answer in answers[:60] if isinstance(answer, dict)] == list(range(1, 61))
    refusals = [str(answer.description) for answer in answers[60:] if isinstance(answer, APIError)]
    assert refusals == ["maximum messages per subject exceeded"] * 60


def test_cancelled_first_message_leaves_the_publisher_usable(table: Table) -> None:
    async def cancel_first() -> None:
        first = asyncio.ensure_future(publish(table.connection.requests, table.subject(RowId(0, 0), "dropped"), b"x"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait((first,))

    table.connection.call(cancel_first(), 10)
    (answer,) = publish_all(table.connection, [table.subject(RowId(0, 1), "dropped")])
    assert isinstance(answer, dict)


def test_message_that_no_stream_takes_fails(connection: Connection) -> None:
    (answer,) = publish_all(connection, ["nobody.listens"])
    assert isinstance(answer, NoStreamResponseError)


def test_silent_server_fails_all_messages_and_the_table_repeats_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.requests.ANSWER_TIMEOUT", 0.3)
    server = Server(tmp_path / "broker")
    connection = Connection(server.start(), "test")
    subjects = Subjects("silent")
    connection.call(ensure_streams(connection, [table_spec(subjects, table_kinds(), 1 << 20)]), 20)
    table = Table(connection, subjects, Store(tmp_path / "store"), "test.0#1")
    assert server.process is not None
    try:
        table.put(table.subject(RowId(0, 0), "dropped"), Dropped("x", ""))
        server.process.send_signal(signal.SIGSTOP)
        os.waitpid(server.process.pid, os.WUNTRACED)  # until then it may answer
        answers = publish_all(connection, [table.subject(RowId(1, index), "dropped") for index in range(3)])
        assert [type(answer) for answer in answers] == [nats.errors.TimeoutError] * 3
        cells = [(table.subject(RowId(2, index), "dropped"), b"x") for index in range(3)]
        writing = connection.submit(table.put_encoded_async(cells))
        server.process.send_signal(signal.SIGCONT)
        writing.result(20)
        assert table.count_cells(table.subjects.column("dropped")) == 7
    finally:
        server.process.send_signal(signal.SIGCONT)
        connection.close()
        server.stop()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("$JS.ACK.TABLE.pool.2.41.7.1700000000000000000.5", Delivery(2, 41, 7)),
        ("$JS.ACK._.hash.TABLE.pool.2.41.7.1700000000000000000.5", Delivery(2, 41, 7)),
        ("$JS.ACK._.hash.TABLE.pool.2.41.7.1700000000000000000.5.token", Delivery(2, 41, 7)),
        ("$JS.ACK.TABLE.pool.two.41.7.1700000000000000000.5", None),
        ("_INBOX.1.2.3.4.5.6.7.8", None),
        ("", None),
    ],
)
def test_delivery_is_parsed_from_the_acknowledgement_subject(reply: str, expected: Delivery | None) -> None:
    assert delivery_of(Msg(_client=None, reply=reply)) == expected  # type: ignore[arg-type]
