"""Timelines: spans from cells and events, lanes without overlap, and a trace that viewers read."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.codec import encode
from broker.subjects import CellId, RowId
from relax_actors.errors import ConfigError
from relax_actors.monitoring.timeline import Builder, Span, Timeline, chrome_trace, laid_out
from relax_actors.monitoring.timeline.reader import within
from tests.support.log_messages import event, metric


def built() -> Timeline:
    """A step of one row whose reward and reference are computed beside each other, and a crash."""
    builder = Builder("demo")

    def cell(name: str, stored: float, author: str) -> None:
        builder.take_cell(CellId("group", 3, 1, name), stored, encode({}, f"{author}#1"))

    cell("prompt", 10.0, "prompts.0")
    cell("trajectory", 14.0, "rollout.1")
    cell("reference", 16.0, "reference.0")
    cell("reward", 15.0, "reward.0")
    cell("advantage", 17.0, "advantages.0")
    builder.take_cell(CellId("batch", 3), 18.0, encode({}, "trainer.0#1"))
    builder.take_cell(CellId("weights", 4), 20.0, encode({}, "trainer.0#1"))
    builder.take_cell(CellId("checkpoint", 4), 21.0, encode({}, "trainer.0#1"))
    builder.take_message(metric("trainer", kind="step", step=3, reward=0.5, starved_seconds=7.5), 18.1)
    builder.take_message(event("started", "reward"), 11.0)
    builder.take_message(event("ready", "reward"), 12.5)
    builder.take_message(event("crashed", "reward", error="ValueError: no\nmore"), 15.5)
    return builder.timeline()


def spans_of(timeline: Timeline) -> dict[str, tuple[float, float, str]]:
    return {span.name: (span.begin, span.end, span.actor) for span in timeline.spans}


def test_column_waits_for_its_inputs_alone() -> None:
    assert spans_of(built()) == {
        "trajectory": (10.0, 14.0, "rollout.1"),
        "reward": (14.0, 15.0, "reward.0"),
        "reference": (14.0, 16.0, "reference.0"),
        "advantage": (16.0, 17.0, "advantages.0"),
        "wait": (10.5, 18.0, "trainer.0"),
        "train": (18.0, 20.0, "trainer.0"),
        "checkpoint": (20.0, 21.0, "trainer.0"),
        "start": (11.0, 12.5, "reward.0"),
    }


def test_names_of_all_profiles_of_many_ranks_are_whole() -> None:
    files = [f"trainer.0-1-0.rank{rank}.json.gz" for rank in range(64)]
    builder = Builder("demo")
    builder.take_message(event("profiled", "trainer", files=files), 1.0)
    builder.take_message(event("crashed", "trainer", error="x" * 300), 2.0)
    profiled, crashed = builder.timeline().instants
    assert profiled.detail.split(", ") == files
    assert len(crashed.detail) == 200


def test_instants_of_a_step_are_those_in_its_time() -> None:
    timeline = within(built(), 3, "step 3")
    assert [(instant.name, instant.detail) for instant in timeline.instants] == [("crashed", "ValueError: no")]
    assert {span.name for span in timeline.spans} == {"trajectory", "reward", "reference", "advantage", "wait", "train"}
    with pytest.raises(ConfigError, match=r"nothing of step 9 is left"):
        within(built(), 9, "step 9")


def test_malformed_cells_and_false_claims_are_left_out() -> None:
    builder = Builder("demo")
    builder.take_cell(CellId("group", 3, 1, "prompt"), 1.0, b"no cell")
    builder.take_message(metric("reward", kind="step", step=1), 1.0)
    assert builder.timeline() == Timeline("demo", (), ())


def test_turns_of_a_sample_follow_each_other() -> None:
    builder, row = Builder("demo"), RowId(3, 1)
    for sample, attempt, number, stored in ((0, 0, 0, 12.0), (1, 0, 0, 13.0), (0, 0, 1, 15.0), (0, 1, 0, 16.0)):
        builder.take_turn(row, (sample, attempt, number), 10.0, stored, {"tokens": 4})
    found = [(span.actor, span.name, span.begin, span.end) for span in builder.timeline().spans]
    assert found == [
        ("sample.0", "turn 0", 10.0, 12.0),
        ("sample.1", "turn 0", 10.0, 13.0),
        ("sample.0", "turn 1", 12.0, 15.0),
        ("sample.0", "turn 0 of attempt 1", 15.0, 16.0),
    ]


def test_trace_has_processes_threads_and_arrows() -> None:
    trace = json.loads(json.dumps(chrome_trace(built())))
    events = trace["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert {"rollout", "rollout.1", "trainer", "reward.0"} <= names
    (trained,) = [event for event in events if event["name"] == "train"]
    assert (trained["ph"], trained["ts"], trained["dur"]) == ("X", 18_000_000, 2_000_000)
    assert trained["args"] == {"reward": 0.5, "step": 3}
    arrows = [event["ph"] for event in events if event["ph"] in "sf"]
    assert arrows.count("s") == arrows.count("f") > 0
    (crash,) = [event for event in events if event["ph"] == "i"]
    assert (crash["name"], crash["s"], crash["args"]["detail"]) == ("crashed", "t", "ValueError: no")


@given(st.lists(st.tuples(st.sampled_from(["a.0", "b.1"]), st.integers(0, 50), st.integers(1, 20)), max_size=60))
def test_spans_of_a_lane_do_not_overlap_and_lanes_are_as_few_as_can_be(numbers: list[tuple[str, int, int]]) -> None:
    spans = [Span("x", float(begin), float(begin + length), actor) for actor, begin, length in numbers]
    lanes = dict(laid_out(spans))
    assert sorted(id(span) for own in lanes.values() for lane in own for span in lane) == sorted(map(id, spans))
    for own in lanes.values():
        assert all(before.end <= after.begin for lane in own for before, after in pairwise(lane))
    for actor, own in lanes.items():
        of_actor = [span for span in spans if span.actor == actor]
        busiest = max(sum(other.begin <= span.begin < other.end for other in of_actor) for span in of_actor)
        assert len(own) == busiest


def test_many_spans_are_laid_out_and_written() -> None:
    spans = tuple(
        Span("trajectory", k / 100, k / 100 + 0.5, f"rollout.{k % 8}", f"group.{k // 64}.{k % 64}", k // 64)
        for k in range(20_000)
    )
    trace = chrome_trace(Timeline("demo", spans, ()))
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 20_000
