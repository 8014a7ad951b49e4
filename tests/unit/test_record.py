"""The record of kept rows: its bound, its rules, and what damage leaves readable."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.codec import encode
from broker.store import Store
from broker.subjects import RowId
from relax_actors.config.record import RecordSection
from relax_actors.errors import RecordError
from relax_actors.messages import DropReason, Prompt, Reward, Sample, TokenSequence, Trajectory
from relax_actors.record.frames import Damage, Frame, frames_of, pack_frame, read_body
from relax_actors.record.position import MAX_STEPS, MAX_VERSIONS, Position, first_unread, position_of, read_versions
from relax_actors.record.record import Record, StepRecord
from relax_actors.record.row_cells import RowCell, pack_row
from relax_actors.record.rules import End, Group, kept_groups, kept_held_out, shelf_of
from relax_actors.record.segments import SegmentWriter, Shelf, segments_in


def groups_of(*rewards: float | None) -> list[Group]:
    return [Group(i, End.TRAINED, rewards=() if one is None else (one,)) for i, one in enumerate(rewards)]


def keep(folder: Path, rows: dict[RowId, bytes], max_bytes: int = 1 << 20) -> None:
    writer = SegmentWriter(folder, max_bytes)
    for number, (row, body) in enumerate(rows.items()):
        assert writer.append(Shelf.ROWS, {"row": str(row), "why": ["every"], "time": float(number)}, body)
    writer.close()


NOTHING = {"every": 0, "highest": 0, "lowest": 0, "failed": False, "evaluation": 0}


@pytest.mark.parametrize(
    ("rules", "step", "kept"),
    [
        ({}, 10, {}),
        ({"every": 5}, 10, {i: ["every"] for i in range(4)}),
        ({"every": 5}, 11, {}),
        ({"share": 1.0}, 11, {i: ["share"] for i in range(4)}),
        ({"highest": 1}, 11, {1: ["highest"]}),
        ({"lowest": 2}, 11, {0: ["lowest"], 2: ["lowest"]}),
        ({"highest": 9, "lowest": 1}, 11, {0: ["highest"], 1: ["highest"], 2: ["highest", "lowest"]}),
    ],
)
def test_rules_keep_rows_of_a_step(rules: dict[str, float], step: int, kept: dict[int, list[str]]) -> None:
    section = RecordSection.model_validate(NOTHING | rules)
    assert kept_groups(section, 7, step, groups_of(0.5, 1.0, 0.0, None)) == kept


def test_a_fault_keeps_a_row_and_an_ordinary_end_does_not() -> None:
    section = RecordSection.model_validate(NOTHING | {"failed": True})
    groups = [
        Group(0, End.QUARANTINED, "reward"),
        Group(1, End.DROPPED, DropReason.LOST_SEGMENT),
        Group(2, End.DROPPED, DropReason.NO_SIGNAL),
        Group(3, End.SURPLUS),
        Group(4, End.TRAINED),
    ]
    assert kept_groups(section, 7, 3, groups) == {0: ["failed"], 1: ["failed"]}
    assert (shelf_of(["failed"]), shelf_of(["evaluation"]), shelf_of(["every"])) == ("special", "special", "rows")


def test_a_share_is_drawn_by_the_seed_and_is_about_as_large_as_asked() -> None:
    section = RecordSection.model_validate(NOTHING | {"share": 0.25})
    groups = groups_of(*[0.0] * 4000)
    kept = kept_groups(section, 7, 3, groups)
    assert 850 < len(kept) < 1150
    assert kept_groups(section, 7, 3, groups) == kept
    assert kept_groups(section, 8, 3, groups) != kept


def test_held_out_rows_are_spread_evenly() -> None:
    assert kept_held_out(RecordSection(evaluation=4), range(100)) == [0, 25, 50, 75]
    assert kept_held_out(RecordSection(evaluation=4), [3, 9]) == [3, 9]
    assert kept_held_out(RecordSection(evaluation=0), range(9)) == []


def test_a_row_is_read_as_it_was_written_with_arrays_of_the_store(tmp_path: Path) -> None:
    store, row, author = Store(tmp_path / "store"), RowId(4, 1), "rollout.0#2"
    random = np.random.default_rng(3)
    tokens = random.integers(0, 9, 9000).astype(np.int32)
    logprobs = np.where(np.arange(9000) < 10, 0, random.normal(size=9000)).astype(np.float32)
    versions = np.where(np.arange(9000) < 10, -1, 3).astype(np.int32)
    sequence = TokenSequence(tokens, np.arange(9000) >= 10, logprobs, versions)
    trajectory = Trajectory.of(tokens[:10], [Sample((sequence,), "said")])
    writer = store.segment_writer(row, "trajectory", author)
    cells = [
        RowCell("prompt", 5, 100.5, encode(Prompt("2+2=", tokens[:10], "4", {}, 1, 0), author)),
        RowCell("trajectory", 8, 101.25, encode(trajectory, author, writer.place)),
        RowCell("reward", 9, 102.0, encode(Reward(np.array([0.1], np.float32)), "reward.0#1")),
    ]
    writer.close()
    keep(tmp_path / "record", {row: pack_row(cells, store)})
    store.remove("group/4")
    found = Record(tmp_path / "record").row(row)
    assert found is not None
    assert list(found.cells.values()) == cells
    read = found.read("trajectory", Trajectory)
    assert read is not None
    assert read.logprobs.tobytes() == logprobs[10:].tobytes()
    assert (read.token_ids == tokens[10:]).all()
    assert (found.author("trajectory"), found.why) == (author, ("every",))
    assert found.read("advantage", Reward) is None


def test_the_bound_holds_and_the_oldest_ordinary_rows_go_first(tmp_path: Path) -> None:
    writer, random = SegmentWriter(tmp_path, 1 << 20), np.random.default_rng(1)
    for step in range(60):
        for shelf, row in ((Shelf.ROWS, f"group.{step}.0"), (Shelf.SPECIAL, f"eval.{step}.0")):
            assert writer.append(shelf, {"row": row, "why": []}, random.bytes(20_000 if shelf == "rows" else 4000))
            assert writer.size == sum(path.stat().st_size for path in tmp_path.glob("0*")) <= 1 << 20
        writer.append(Shelf.STEPS, {"step": step}, StepRecord(step).pack())
    writer.close()
    record = Record(tmp_path)
    steps = [row.step for row in record.rows("group")]
    assert steps == list(range(steps[0], 60))
    assert 20 < len(steps) < 45
    assert [row.step for row in record.rows("eval")] == list(range(60))
    assert record.steps() == list(range(60))


def test_special_rows_go_when_there_are_no_others(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, 1 << 20)
    for step in range(80):
        writer.append(Shelf.SPECIAL, {"row": f"eval.{step}.0", "why": []}, os.urandom(30_000))
    assert writer.size <= 1 << 20
    assert not writer.append(Shelf.ROWS, {"row": "group.0.0", "why": []}, os.urandom(300_000))
    writer.close()
    assert Record(tmp_path).rows()[-1] == RowId(79, 0, "eval")


def test_an_unfinished_frame_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    keep(tmp_path, {RowId(0, 0): b"a" * 100, RowId(0, 1): b"b" * 100})
    (segment,) = segments_in(tmp_path)
    whole = segment.path.read_bytes()
    for cut in (1, 27, 40, len(whole) // 2 - 1):
        segment.path.write_bytes(whole[: len(whole) - cut])
        assert Record(tmp_path).rows() == [RowId(0, 0)]
        assert Record(tmp_path).damages() == []
        writer = SegmentWriter(tmp_path, 1 << 20)
        assert len(writer.removed) == 1
        writer.append(Shelf.ROWS, {"row": "group.1.0", "why": []}, b"c")
        writer.close()
        record = Record(tmp_path)
        assert (record.rows(), record.damages()) == ([RowId(0, 0), RowId(1, 0)], [])


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, 1 << 20)
    with pytest.raises(RecordError, match="another process"):
        SegmentWriter(tmp_path, 1 << 20)
    writer.close()
    SegmentWriter(tmp_path, 1 << 20).close()


def test_a_damaged_row_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    rows = {RowId(0, i): pack_row([RowCell("prompt", i, 0.0, os.urandom(200))], Store(tmp_path)) for i in range(3)}
    keep(tmp_path / "record", rows)
    (segment,) = segments_in(tmp_path / "record")
    data = bytearray(segment.path.read_bytes())
    first, second, _ = (frame for frame in frames_of(segment.path) if isinstance(frame, Frame))
    data[second.body_at + 5] ^= 1
    data[first.offset + 30] ^= 1
    segment.path.write_bytes(data)
    record = Record(tmp_path / "record")
    assert record.rows() == [RowId(0, 1), RowId(0, 2)]
    (damage,) = record.damages()
    assert (damage.offset, damage.size) == (0, first.end)
    assert f"{first.end} bytes from byte 0" in str(damage)
    with pytest.raises(RecordError, match=r"group\.0\.1 cannot be read"):
        record.row(RowId(0, 1))
    assert record.row(RowId(0, 2)) is not None


@given(
    bodies=st.lists(st.binary(max_size=60), min_size=1, max_size=5),
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=3),
    cut=st.integers(0, 50),
)
def test_no_damage_gives_a_wrong_body_or_hides_a_whole_frame(
    bodies: list[bytes], flips: list[tuple[int, int]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    packed = [pack_frame({"number": i}, body) for i, body in enumerate(bodies)]
    data = bytearray(b"".join(packed))
    touched = set()
    for at, bits in flips:
        data[at % len(data)] ^= bits
        touched.add(at % len(data))
    data = data[: max(0, len(data) - cut)]
    path = tmp_path_factory.mktemp("frames") / "x"
    path.write_bytes(data)
    found = list(frames_of(path))
    read = {}
    for frame in found:
        if isinstance(frame, Frame):
            try:
                read[frame.head["number"]] = read_body(frame)
            except RecordError:
                assert touched
    begin = 0
    for i, frame_bytes in enumerate(packed):
        end = begin + len(frame_bytes)
        if end <= len(data) and not touched & set(range(begin, end)):
            assert read[i] == bodies[i]
        begin = end
    assert all(body == bodies[i] for i, body in read.items())
    covered = sum(part.size if isinstance(part, Damage) else part.end - part.offset for part in found)
    assert covered == len(data)


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    step = StepRecord(3, (Group(0, End.TRAINED, "", (0.5, 0.25)), Group(2, End.DROPPED, "no_signal")), {"reward": 0.5})
    writer = SegmentWriter(tmp_path, 1 << 20)
    writer.append(Shelf.STEPS, {"step": 3}, step.pack())
    writer.close()
    assert Record(tmp_path).step(3) == step
    assert Record(tmp_path).step(4) is None


@pytest.mark.parametrize(
    ("recorded", "floor", "room", "first"),
    [
        (-1, 5, 100, 0),
        (2, 5, 100, 3),
        (4, 5, 100, 5),
        (9, 5, 100, 5),  # the recorder is ahead of the floor
        (-1, MAX_STEPS + 5, 10_000, 5),
        (-1, 5, 25, 3),  # each step takes 10 bytes
        (-1, 5, 0, 5),
    ],
)
def test_unread_steps_below_the_floor_stay_within_a_bound(recorded: int, floor: int, room: int, first: int) -> None:
    assert first_unread(floor, recorded, lambda _: 10, room) == first


def test_evaluations_stay_until_they_are_read_within_a_bound() -> None:
    assert read_versions({0, 4, 8}, 4) == {0, 4}
    assert read_versions(range(20), -1) == set(range(20 - MAX_VERSIONS))


def test_the_position_of_a_recorder_is_in_the_lease_of_the_root() -> None:
    state = {"phase": "ready", "recorded": {"step": 3, "version": -1}}
    assert position_of({"children": {"node": {}, "recorder": state}}) == Position(3, -1)
    assert position_of({"children": {"recorder": {"phase": "starting"}}}) == Position(-1, -1)
    assert position_of({"children": {"recorder": {"recorded": {"step": "x", "y": 1}}}}) == Position(-1, -1)
    assert position_of({"children": {"node": {}}}) is None
    assert position_of(None) is None
