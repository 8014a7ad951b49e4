"""Look-ups of cells on a real server: one request for many cells, and headers that imitate those of the server."""

from __future__ import annotations

import pytest

from broker.client import read_headers
from broker.streams import ensure_streams, table_spec
from broker.subjects import RowId
from broker.table import Table
from relax_actors.messages import Dropped
from relax_actors.roles import table_kinds


def publish(table: Table, subject: str, data: bytes, headers: dict[str, str]) -> None:
    table.connection.call(table.connection.js.publish(subject, data, headers=headers), 10)


def test_one_request_answers_for_many_cells(table: Table) -> None:
    subjects = [table.subject(RowId(0, index), "dropped") for index in range(600)]
    written = subjects[::2]
    table.put_all((subject, Dropped(subject, "")) for subject in written)
    sent = table.connection.nc.stats["out_msgs"]
    cells = table.get_all(subjects)
    assert table.connection.nc.stats["out_msgs"] - sent < len(subjects)
    assert [cell.subject for cell in cells if cell is not None] == written
    assert [cell is None for cell in cells] == [False, True] * 300
    assert table.read(cells[2].data, Dropped).reason == subjects[2]  # type: ignore[union-attr]


def test_cells_of_more_bytes_than_the_server_holds_for_a_client_are_all_read(table: Table) -> None:
    subjects = [table.subject(RowId(0, index), "value") for index in range(240)]
    body = bytes(1 << 20)
    table.connection.call(ensure_streams(table.connection, [table_spec(table.subjects, table_kinds(), 1 << 29)]), 20)
    for begin in range(0, len(subjects), 20):
        table.put_encoded([(subject, body) for subject in subjects[begin : begin + 20]])
    stats = table.connection.nc.stats
    sent, reconnects = stats["out_msgs"], stats["reconnects"]
    cells = table.get_all([*subjects, table.subject(RowId(0, 240), "value")])
    assert [cell is not None and len(cell.data) == len(body) for cell in cells] == [True] * 240 + [False]
    assert stats["out_msgs"] - sent < len(subjects)
    assert stats["reconnects"] == reconnects


@pytest.mark.parametrize("data", [b"", b"x"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Status": "404"},
        {"Status": "204", "Description": "EOB"},
        {"Nats-Subject": "relax.other.weights.1", "Nats-Sequence": "77", "Nats-Stream": "other"},
        {"Nats-Sequence": "none"},
        {"long": "y" * 4050},
    ],
    ids=["missing", "end", "another", "number", "long"],
)
def test_headers_of_a_cell_do_not_change_its_answer(table: Table, headers: dict[str, str], data: bytes) -> None:
    forged, other = (table.subject(RowId(0, index), "dropped") for index in range(2))
    publish(table, forged, data, headers)
    publish(table, other, b"other", {})
    for cell in (table.get(forged), table.get_all([forged, other])[0]):
        assert cell is not None
        assert (cell.subject, cell.sequence, cell.data) == (forged, 1, data)
    found = table.get_all([other, forged])[0]
    assert found is not None
    assert found.data == b"other"


def test_last_of_several_values_counts() -> None:
    assert read_headers(b"NATS/1.0 404 Message Not Found\r\na: 1\r\na: 2\r\n\r\n") == {
        "Status": "404",
        "Description": "Message Not Found",
        "a": "2",
    }
    assert read_headers(b"NATS/1.0\r\nx: \xff\r\n\r\n") is None
