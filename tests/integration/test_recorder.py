"""The recorder on a real table: which rows it keeps, what it knows of the others, and a full disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from broker.address import Address
from broker.connection import Connection
from broker.errors import BrokerUnreachableError
from broker.history import PAGE_MESSAGES
from broker.subjects import RowId
from broker.table import Table
from relax_actors.config.record import RecordSection
from relax_actors.messages import Batch, Dropped, Prompt, Reward, Sample, TokenSequence, Trajectory
from relax_actors.record import recorder as recorder_module
from relax_actors.record.position import Position
from relax_actors.record.record import Record
from relax_actors.record.recorder import Recorder
from relax_actors.record.rules import End
from tests.support.stopping_proxy import StoppingProxy

ONE_OF_EACH = {"every": 0, "highest": 1, "lowest": 1}


def catch_up(table: Table, folder: Path, **section: float) -> tuple[Position, Position, int]:
    """Record what has ended; return the position before and after, and the size of the record in bytes."""
    settings = RecordSection.model_validate(ONE_OF_EACH | section)
    with closing(Recorder(table.connection, table.subjects, table.store, settings, 1, folder)) as recorder:
        before = recorder.position
        recorder.catch_up()
        return before, recorder.position, recorder.size


def put_row(table: Table, row: RowId, reward: float | None) -> None:
    """Write the cells of a row with one sample of three tokens; without a reward only its prompt."""
    prompt = np.arange(2, dtype=np.int32)
    table.put(table.subject(row, "prompt"), Prompt("1+1", prompt, "2", {}, 1, 0))
    if reward is None:
        return
    tokens = np.arange(5, dtype=np.int32)
    own = tokens >= len(prompt)
    sequence = TokenSequence(
        tokens, own, np.where(own, -0.5, 0).astype(np.float32), np.where(own, 1, -1).astype(np.int32)
    )
    table.put(table.subject(row, "trajectory"), Trajectory.of(prompt, [Sample((sequence,), "two")]))
    table.put(table.subject(row, "reward"), Reward(np.array([reward], np.float32)))


def end_step(table: Table, step: int, rows: Sequence[int]) -> None:
    """Write the batch of a step."""
    table.put(table.subjects.numbered("batch", step), Batch(list(rows), 1, 1, 0.5, 0, 9, 100.0))


def test_kept_rows_are_whole_and_of_the_others_the_rewards_are_known(table: Table, tmp_path: Path) -> None:
    for index, reward in enumerate((0.25, 1.0, 0.0, 0.5)):
        put_row(table, RowId(0, index), reward)
    end_step(table, 0, range(4))
    before, after, _ = catch_up(table, tmp_path / "record")
    assert (before, after) == (Position(-1, -1), Position(0, -1))
    record = Record(tmp_path / "record")
    assert record.rows() == [RowId(0, 1), RowId(0, 2)]
    kept, step = record.row(RowId(0, 1)), record.step(0)
    assert kept is not None
    assert step is not None
    assert set(kept.cells) == {"prompt", "trajectory", "reward"}
    assert [group.rewards for group in step.groups] == [(0.25,), (1.0,), (0.0,), (0.5,)]
    assert [(group.tokens, group.oldest) for group in step.groups] == [(None, None), (3, 1), (3, 1), (None, None)]


def test_step_with_failed_rows_is_read_whole(table: Table, tmp_path: Path) -> None:
    for index, reward in enumerate((0.25, None, 0.0, 0.5, None, 0.75)):
        put_row(table, RowId(0, index), reward)
    table.put(table.subject(RowId(0, 1), "dropped"), Dropped("lost_segment", ""))
    end_step(table, 0, (0, 5, 2, 3))
    catch_up(table, tmp_path / "record", highest=0, lowest=0)
    record = Record(tmp_path / "record")
    step = record.step(0)
    assert step is not None
    trained, lost, surplus = End.TRAINED, End.DROPPED, End.SURPLUS
    assert [group.end for group in step.groups] == [trained, lost, trained, trained, surplus, trained]
    assert record.rows() == [RowId(0, 1)]


def test_collected_step_and_one_without_rewards_are_told_apart(table: Table, tmp_path: Path) -> None:
    put_row(table, RowId(1, 0), None)
    for step in (0, 1):
        end_step(table, step, [0])
    catch_up(table, tmp_path / "record", every=1)
    record = Record(tmp_path / "record")
    assert [found.collected for step in (0, 1) if (found := record.step(step)) is not None] == [True, False]
    assert record.rows() == [RowId(1, 0)]


def test_nothing_is_kept_while_the_disk_is_nearly_full(table: Table, small_disk: Path) -> None:
    put_row(table, RowId(0, 0), 1.0)
    end_step(table, 0, [0])
    assert catch_up(table, small_disk / "record")[1:] == (Position(0, -1), 0)


def test_next_recorder_goes_on_behind_the_last_step(table: Table, tmp_path: Path) -> None:
    for step in (0, 1):
        put_row(table, RowId(step, 0), 1.0)
    end_step(table, 0, [0])
    catch_up(table, tmp_path / "record")
    end_step(table, 1, [0])
    assert catch_up(table, tmp_path / "record")[:2] == (Position(0, -1), Position(1, -1))
    assert Record(tmp_path / "record").rows() == [RowId(0, 0), RowId(1, 0)]


def test_steps_of_a_page_are_recorded_although_the_broker_does_not_answer_to_the_next(
    table: Table, address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = range(PAGE_MESSAGES + 10)
    table.put_all([(table.subjects.numbered("batch", step), Batch([], 1, 1, 0.5, 0, 9, 100.0)) for step in steps])
    monkeypatch.setattr(recorder_module, "CALL_SECONDS", 1.0)
    proxy = StoppingProxy(address, b'"batch"', passed=1)
    settings = RecordSection.model_validate(ONE_OF_EACH)
    with (
        closing(proxy),
        closing(Connection(proxy.address, "recorder")) as connection,
        closing(Recorder(connection, table.subjects, table.store, settings, 1, tmp_path / "record")) as recorder,
    ):
        with pytest.raises(BrokerUnreachableError):
            recorder.catch_up()
        proxy.go_on()
        recorder.catch_up()
    assert Record(tmp_path / "record").steps() == list(steps)
