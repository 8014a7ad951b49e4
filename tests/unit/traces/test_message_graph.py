"""Graphs of verifiers: the prompt of a trace with sub-agents, and what of a graph is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_actors.data.source import SourceSettings
from relax_actors.data.traces import TraceRows, open_traces
from relax_actors.traces import TraceError, trajectory_of
from relax_actors.traces.formats import trace_of


def node(ids: list[int], sampled: int = 0, parent: int | None = None, **more: Any) -> dict[str, Any]:
    """Build a message whose last `sampled` tokens are trained."""
    mask = [False] * (len(ids) - sampled) + [True] * sampled
    message = {"role": "assistant" if sampled else "user", "content": ""}
    return {"parent": parent, "message": message, "token_ids": ids, "mask": mask, "logprobs": [-0.5] * sampled, **more}


def graph(*nodes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"version": 1, "nodes": list(nodes), "rewards": {"r": {"score": 1.0}}, **more}


def with_sub_agent(asked: int) -> dict[str, Any]:
    """Build a trace whose agent calls a sub-agent with the token `asked`, which the sub-agent reads."""
    return graph(
        node([1, 2]), node([5, asked], 1, 0), node([8, asked]), node([5, 6], 1, 2), node([6], 0, 1), node([5, 7], 1, 4)
    )


def rows_of(folder: Path, *records: dict[str, Any]) -> TraceRows:
    path = folder / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return open_traces(SourceSettings(path=path))


def test_prompt_of_a_trace_with_a_sub_agent_is_that_of_the_agent(tmp_path: Path) -> None:
    source = rows_of(tmp_path, with_sub_agent(3), with_sub_agent(4))
    assert len(source) == 1
    made = trajectory_of(source.traces(0))
    assert made.prompt_tokens.tolist() == [1, 2, 5]
    assert [trace.trained_tokens for trace in source.traces(0)] == [3, 3]


def test_message_without_an_answer_is_not_in_the_prompt(tmp_path: Path) -> None:
    straight = graph(node([1, 2]), node([4], 0, 0), node([5, 6], 1, 1))
    dead_end = graph(node([1, 2]), node([3], 0, 0), node([4], 0, 0), node([5, 6], 1, 2))
    source = rows_of(tmp_path, straight, dead_end)
    assert len(source) == 1
    assert trajectory_of(source.traces(0)).prompt_tokens.tolist() == [1, 2, 4, 5]


def test_rejected_summary_before_the_first_answer_does_not_end_the_prompt(tmp_path: Path) -> None:
    summary = node([9], 1, 0, semantic_parents=[{"node": 0, "type": "compaction_attempt"}])
    rejected = graph(node([1, 2]), summary, node([4], 0, 0), node([5, 6], 1, 2))
    source = rows_of(tmp_path, graph(node([1, 2]), node([4], 0, 0), node([5, 6], 1, 1)), rejected)
    assert len(source) == 1
    made = trajectory_of(source.traces(0))
    assert made.prompt_tokens.tolist() == [1, 2, 4, 5]
    assert int(made.trained.sum()) == 2


def test_message_that_is_malformed_behind_the_prompt_stays_in_its_row(tmp_path: Path) -> None:
    straight = graph(node([1, 2]), node([5, 6], 1, 0))
    other, malformed = graph(node([3]), node([5, 6], 1, 0)), graph(*straight["nodes"], {"parent": "1"})
    source = rows_of(tmp_path, other, malformed, straight)
    assert len(source) == 2
    assert source.traces(0)[0].trained_tokens == 1
    with pytest.raises(TraceError, match="line 2, message 2"):
        source.traces(1)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (graph(node([1]), node([2, 3], 1, 0), agent={"trainable": False}), r"agent\.trainable is False.*leave"),
        (graph(node([1]), node([2, 3], 1, 0), mm_token_type_id_map={"1": 1}), "message 0.*mm_token_type_id_map"),
        (graph(node([1], multi_modal_data={"mm_hashes": {}}), node([2, 3], 1, 0)), "message 0.*multi_modal_data"),
        (
            graph(node([1], message={"role": "user", "content": [{"type": "image_url"}]}), node([2, 3], 1, 0)),
            "message 0.*media.*image_url",
        ),
        (graph(node([1, 2]), node([3], 1)), "no prompt with trained tokens behind it"),
    ],
)
def test_graph_that_would_be_trained_wrongly_is_refused(record: dict[str, Any], says: str) -> None:
    with pytest.raises(TraceError, match=f"^file line 3.*{says}"):
        trace_of(record, "file line 3")


def test_text_of_a_renderer_that_knows_media_is_trained() -> None:
    text = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    nodes = node([1], message=text, multi_modal_data=None), node([2, 3], 1, 0)
    trace = trace_of(graph(*nodes, agent={"trainable": True}, mm_token_type_id_map={"99": 1}), "f")
    assert trace.trained_tokens == 1


def test_long_graph_is_read_and_too_long_a_graph_is_refused() -> None:
    chain = [node([1]), *(node([5, 6], number % 2, number - 1) for number in range(1, 4_001))]
    assert trace_of(graph(*chain), "f").trained_tokens == 2_000
    with pytest.raises(TraceError, match="f: 10001 turns, more than 10000"):
        trace_of(graph(node([1]), *(node([5, 6], 1, number) for number in range(10_001))), "f")
    forks = [node([2], 0, 500) for _ in range(400)]
    with pytest.raises(TraceError, match="200800 messages on its branches, more than 200000"):
        trace_of(graph(node([1]), *(node([5], 0, number) for number in range(500)), *forks), "f")
