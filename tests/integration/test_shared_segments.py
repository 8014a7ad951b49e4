"""Segments shared by cells that were written together: crash safety, damage and collection, with real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from broker.address import Address
from broker.errors import StoreError
from broker.segment import INLINE_BYTES
from broker.store import Store
from broker.subjects import RowId
from broker.table import Table
from relax_actors.messages import Reward

ROWS = [RowId(3, index) for index in range(4)]
PROGRAM = Path(__file__).parents[1] / "support" / "segment_author.py"


def author(table: Table, address: Address, tmp_path: Path, number: int, stage: str) -> int:
    """Run another author of the cells up to a stage in a process of its own; return its exit status."""
    address.save(tmp_path / "address.json")
    folder, run = str(table.store.root), table.subjects.run
    command = [sys.executable, str(PROGRAM), str(tmp_path / "address.json"), folder, run, str(number), stage]
    return subprocess.run(command, check=False, timeout=60).returncode


def values_of(table: Table, row: RowId) -> np.ndarray:
    cell = table.get(table.subject(row, "reward"))
    assert cell is not None
    return table.read(cell.data, Reward).values


def segments(store: Store) -> list[str]:
    return sorted(str(path.relative_to(store.root)) for path in store.root.rglob("*.safetensors"))


def put_rows(table: Table, rows: list[RowId]) -> None:
    large = INLINE_BYTES // 4 + 1
    table.put_all((table.subject(row, "reward"), Reward(np.full(large, row.index, np.float32))) for row in rows)


def test_cells_of_one_step_that_are_written_together_share_a_segment(table: Table) -> None:
    put_rows(table, [*ROWS, RowId(4, 0), RowId(3, 0, "eval")])
    assert segments(table.store) == [
        "eval/3/0.reward.test.0-1.2.safetensors",
        "group/3/0.reward.test.0-1.0.safetensors",
        "group/4/0.reward.test.0-1.1.safetensors",
    ]
    for row in ROWS:
        assert values_of(table, row)[0] == row.index
    table.store.remove_later("group/3")
    table.store.close()
    assert values_of(table, RowId(4, 0))[0] == 0
    with pytest.raises(StoreError, match=r"segment group/3/0\.reward\.test\.0-1\.0\.safetensors is missing or empty"):
        values_of(table, ROWS[1])


@pytest.mark.parametrize(("stage", "written"), [("segment", 0), ("cells", 2)])
def test_author_killed_after_its_segment_or_between_its_cells_loses_nothing(
    table: Table, address: Address, tmp_path: Path, stage: str, written: int
) -> None:
    assert author(table, address, tmp_path, 1, stage) == -signal.SIGKILL
    assert table.count_cells(table.subjects.column("reward")) == written
    assert author(table, address, tmp_path, 2, "end") == 0
    # The value is the number of the author: its own cells keep the arrays of the killed one.
    found = [int(values_of(table, row)[0]) for row in ROWS]
    assert found == [1] * written + [2] * (len(ROWS) - written)
    assert len(segments(table.store)) == 2
    table.store.remove_later("group/3")  # the segment that no cell refers to goes with the step
    table.store.close()
    assert segments(table.store) == []


def test_refused_author_does_not_touch_the_segment_of_the_first(table: Table, address: Address, tmp_path: Path) -> None:
    assert author(table, address, tmp_path, 1, "end") == 0
    assert author(table, address, tmp_path, 2, "end") == 0
    assert [int(values_of(table, row)[0]) for row in ROWS] == [1] * len(ROWS)


def test_collector_killed_in_the_middle_is_continued_by_the_next(
    table: Table, address: Address, tmp_path: Path
) -> None:
    for step in range(60):
        put_rows(table, [RowId(step, 0)])
    assert author(table, address, tmp_path, 1, "collect") == -signal.SIGKILL
    left = {int(name) for name in table.store.list_names("group")}
    assert 59 in left
    for name in left - {59}:
        table.store.remove_later(f"group/{name}")
    table.store.close()
    assert table.store.list_names("group") == ["59"]
    assert values_of(table, RowId(59, 0))[0] == 0


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damaged_segment_is_noticed_for_each_row_that_it_holds(table: Table, damage: str) -> None:
    put_rows(table, ROWS)
    path = table.store.root / segments(table.store)[0]
    data = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) - 100] ^= 1  # in the array of the last row
        path.write_bytes(data)
    lost = []
    for row in ROWS:
        try:
            assert values_of(table, row)[0] == row.index
        except StoreError as error:
            lost.append((row.index, str(error).split(":", 1)[0]))
    name = f"segment {path.relative_to(table.store.root)}"
    if damage == "delete":
        assert lost == [(index, f"{name} is missing or empty") for index in range(4)]
    elif damage == "truncate":
        assert [index for index, _ in lost] == [1, 2, 3]
    else:
        assert lost == [(3, f"{name} is corrupt")]
