"""Malformed messages on a real server: nobody's connection, follower, pump or journal is hurt by one."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from broker.address import Address
from broker.codec import MAX_CELL_BYTES
from broker.credentials import sign_in
from broker.errors import CodecError
from broker.leases import Failures, RunState
from broker.ordered_consumer import OrderedConsumer
from broker.streams import ensure_bucket, ensure_streams, table_spec
from broker.subjects import RowId
from broker.table import Cell, Table
from relax_actors.config import validate
from relax_actors.messages import Batch
from relax_actors.roles import table_kinds
from relax_actors.runtime import Context
from relax_actors.runtime.cells import fetch_own, put_own
from relax_actors.runtime.journal import BURST, MAX_BYTES, Journal
from relax_actors.runtime.run_folder import RunFolder
from tests.support.contexts import MakeTrainer
from tests.support.fuzzing import Fuzzer, samples
from tests.support.running import wait_until
from tests.support.tiny_stateful import Audit, Auditor

ROW = RowId(3, 4)


def publish_raw(address: Address, lines: bytes) -> None:
    """Send protocol lines as a client of no library does."""
    host, port = address.url.removeprefix("nats://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        greeting = json.loads(connection.makefile("rb").readline().removeprefix(b"INFO "))
        login = {"headers": True, "verbose": False, **sign_in(Path(str(address.credentials)), greeting["nonce"])[1]}
        connection.sendall(b"CONNECT " + json.dumps(login).encode() + b"\r\n" + lines + b"PING\r\n")
        heard = b""
        while b"PONG" not in heard:
            heard += connection.recv(4096)


def follow(table: Table, count: int) -> list[Cell]:
    async def work() -> list[Cell]:
        follower = OrderedConsumer(table.connection, table.subjects.table_stream, [f"{table.subjects.prefix}.>"])
        found: list[Cell] = []
        async for batch in follower.batches(tick=0.2):
            found += [Cell(m.subject, 0, m.data) for m in batch]
            if len(found) >= count:
                break
        await follower.close()
        return found

    return table.connection.call(work(), 20)


def test_a_subject_that_is_no_utf8_does_not_end_a_connection(table: Table, address: Address) -> None:
    prefix = table.subjects.prefix.encode()
    publish_raw(address, b"PUB " + prefix + b".group.1.\xff\xfe.prompt 2\r\nab\r\n")
    table.put(table.subject(ROW, "dropped"), samples()["dropped"])
    assert [c.subject.rsplit(".", 1)[1] for c in follow(table, 2)] == ["prompt", "dropped"]
    assert [cell_id.row for cell_id, _ in table.snapshot([f"{table.subjects.prefix}.group.>"])] == [ROW]


@pytest.mark.parametrize("status", ["404", "409", "503", "100", "x"])
def test_a_message_that_pretends_to_be_the_servers_answer_is_a_message(table: Table, status: str) -> None:
    subject = table.subject(ROW, "prompt")
    headers = {"Status": status, "Description": "Consumer Deleted", "Nats-Sequence": "x", "Nats-Subject": "y"}

    async def publish() -> None:
        await table.connection.js.publish(subject, b"", headers=headers)

    table.connection.call(publish(), 10)
    table.put(table.subject(ROW, "dropped"), samples()["dropped"])
    assert [c.data[:1] for c in follow(table, 2)] == [b"", b"\x94"]
    found = table.get(subject, direct=False)
    assert found is not None
    assert (found.subject, found.data) == (subject, b"")
    assert table.get(subject) in (None, found)
    table.remove([found, found])
    assert table.put(subject, samples()["prompt"])


def test_removing_what_is_gone_is_no_error_and_spares_what_came_since(table: Table) -> None:
    subjects = [table.subject(RowId(0, i), "dropped") for i in range(3)]
    table.put_encoded([(subject, b"x") for subject in subjects])
    cells = [cell for _, cell in table.snapshot([table.subjects.column("dropped")])]
    for _ in range(2):
        table.remove(cells[1:2])
    assert table.put(subjects[1], samples()["dropped"])
    table.remove(cells)
    assert [cell.subject for _, cell in table.snapshot([table.subjects.column("dropped")])] == [subjects[1]]


def test_sizes_are_bounded_by_the_server_and_by_the_writer(table: Table) -> None:
    async def publish(size: int) -> None:
        await table.connection.js.publish(table.subject(ROW, "prompt"), bytes(size))

    with pytest.raises(nats.errors.Error, match="size"):
        table.connection.call(publish(MAX_CELL_BYTES + 8192), 10)
    with pytest.raises(CodecError, match="a cell at most"):
        table.put(table.subject(ROW, "prompt"), "x" * (MAX_CELL_BYTES + 1))


def context_of(table: Table, tmp_path: Path, role: str = "trainer") -> Context:
    connection = table.connection
    state = RunState(connection, connection.call(ensure_bucket(connection, table.subjects), 20))
    config = validate({"model": {"path": "m"}, "data": {"kind": "jsonl"}, "run": {"name": table.subjects.run}}, "t")
    journal = Journal(connection, table.subjects, role, 0)
    return Context(config, RunFolder(tmp_path), role, 0, 1, table, state, journal)


def events(table: Table) -> list[dict[str, Any]]:
    async def work() -> list[dict[str, Any]]:
        follower = OrderedConsumer(table.connection, table.subjects.log_stream, [f"{table.subjects.prefix}.event.>"])
        found: list[dict[str, Any]] = []
        async for batch in follower.batches(tick=0.3):
            found += [json.loads(m.data) for m in batch]
            if not batch:
                break
        await follower.close()
        return found

    return table.connection.call(work(), 20)


def test_an_owner_takes_its_cell_back_from_a_malformed_one(table: Table, tmp_path: Path) -> None:
    context = context_of(table, tmp_path)
    batch = Batch([0, 1], 5, 1, 0.5, 0, 20, 1e9)
    subject = table.subjects.numbered("batch", 3)
    table.put_encoded([(subject, Fuzzer("x", 1).content("batch"))])
    with pytest.raises(CodecError):
        table.fetch(subject, Batch)
    assert put_own(context, subject, batch) is None
    assert table.fetch(subject, Batch) == batch
    assert put_own(context, subject, Batch([7], 5, 2, 0.5, 0, 20, 1e9)) == batch
    table.put_encoded([(table.subjects.numbered("batch", 4), b"")])
    assert fetch_own(context, table.subjects.numbered("batch", 4), Batch) is None
    assert table.get(table.subjects.numbered("batch", 4)) is None
    told = wait_until(lambda: events(table)[1:] and events(table), "two events")
    kinds = [(event["kind"], event["subject"].rsplit(".", 1)[1]) for event in told]
    assert kinds == [("malformed_cell", "3"), ("malformed_cell", "4")]


def test_a_role_of_the_user_gets_its_cell_back_through_the_trainer(
    make_trainer: MakeTrainer, table: Table, tmp_path: Path
) -> None:
    kinds = table_kinds([Auditor.spec])
    spec = table_spec(table.subjects, kinds, 1 << 26)
    table.connection.call(ensure_streams(table.connection, [spec]), 30)
    context, subject = context_of(table, tmp_path, "auditor"), table.subjects.numbered("audit", 7)
    well_formed, nameless = table.subjects.numbered("audit", 8), f"{table.subjects.prefix}.audit.07"
    table.put(well_formed, Audit(8))
    table.put_encoded([(subject, Fuzzer("x", 1).content("batch")), (nameless, b"")])
    assert fetch_own(context, subject, Audit) is None
    (told,) = wait_until(lambda: events(table), "an event")
    assert (told["kind"], told["subject"], told.get("removed", False)) == ("malformed_cell", subject, False)
    assert table.get(subject, direct=False) is not None
    make_trainer()
    assert table.get(subject, direct=False) is None
    assert table.get(nameless, direct=False) is None
    assert put_own(context, subject, Audit(7)) is None
    assert table.fetch(well_formed, Audit) == Audit(8)


def test_the_last_of_a_kind_is_the_last_that_can_be_read(table: Table) -> None:
    assert table.fetch_last("batch", Batch) is None
    batch = Batch([0, 1], 5, 1, 0.5, 0, 20, 1e9)
    table.put_encoded([(table.subjects.numbered("batch", 0), b"x")])
    assert table.fetch_last("batch", Batch) is None
    table.put(table.subjects.numbered("batch", 1), batch)
    another = table.encode(table.subjects.numbered("batch", 9), batch)
    table.put_encoded([(table.subjects.numbered("batch", n), another) for n in (2, 3)])
    assert table.fetch_last("batch", Batch) == batch


@pytest.mark.parametrize(
    "entry",
    [
        *(b"", b"{", b"\xff", b"[" * 9999, b"3", b"[]", b"{}"),
        *(
            b'{"count": -4}',
            b'{"count": 1e99}',
            b'{"count": "x"}',
            b'{"count": 4, "external_kills": 2, "checksum": "x"}',
        ),
    ],
)
def test_an_entry_that_is_none_stops_no_count(table: Table, tmp_path: Path, entry: bytes) -> None:
    connection, state = table.connection, context_of(table, tmp_path).state
    lives = [connection.call(state.next_incarnation("trainer", 0), 10) for _ in range(3)]
    assert connection.call(state.count_failure("reward", ROW, "E", "T"), 10) == 1

    async def spoil() -> None:
        for key in ("incarnation.trainer.0", f"failure.reward.{ROW}", "lease.trainer.0"):
            await connection.js.publish(f"$KV.{table.subjects.state_bucket}.{key}", entry)

    connection.call(spoil(), 10)
    assert connection.call(state.failures("reward", ROW), 10) == Failures()
    assert connection.call(state.count_failure("reward", ROW, "E", "T"), 10) == 1
    assert connection.call(state.incarnations("trainer", 0), 10) == 0
    later = connection.call(state.next_incarnation("trainer", 0), 10)
    assert later > lives[-1]
    assert connection.call(state.incarnations("trainer", 0), 10) == later
    assert all(isinstance(lease, dict) for lease in connection.call(state.leases(), 10).values())


def test_no_event_is_too_large_and_a_flood_is_told_as_a_number(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_actors.runtime.journal.REPORT_SECONDS", 0.5)
    journal = Journal(table.connection, table.subjects, "reward", 0)
    journal.event("row_failed", error="é" * (10 << 20), rows=["x" * 100] * 5000)
    journal.event("row_failed", **{f"f{i}": "x" * 15_000 for i in range(200)})
    journal.event("row_failed", row="group.0.1", error="\U0001f600" * 20_000, traceback="\U0001f600" * 20_000)
    journal.metric({"values": float("nan"), "text": "x" * (10 << 20)})
    for _ in range(BURST + 40):
        journal.event("malformed_cell", subject="s")
    found = wait_until(lambda: [e for e in events(table) if e["kind"] == "suppressed"] and events(table), "suppressed")
    assert [(e["of"], e["count"] >= 20) for e in found if e["kind"] == "suppressed"] == [("malformed_cell", True)]
    told = sum(e["kind"] == "malformed_cell" for e in found)
    assert told + next(e["count"] for e in found if e["kind"] == "suppressed") == BURST + 40
    long = [e for e in found if e["kind"] == "row_failed"]
    assert "characters left out" in long[0]["error"]
    assert long[1]["too_long"] > MAX_BYTES
    assert (long[2]["row"], long[2]["role"]) == ("group.0.1", "reward")
    assert "characters left out" in long[2]["error"]
