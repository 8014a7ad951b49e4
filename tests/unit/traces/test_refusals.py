"""Traces that are not exact are refused by name and place, and no token is trained twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.data.trace_maker import checked_text
from relax_actors.messages import TokenSequence
from relax_actors.traces import TraceError, trajectory_of
from relax_actors.traces.formats import FORMATS, trace_of
from tests.support.traces import digits, own, write_traces

IMAGE = [{"type": "text", "text": "look"}, {"type": "image", "source": {"path": "a.png"}}]


def step(number: int, context: list[int], tokens: list[int], **more: Any) -> dict[str, Any]:
    """Build a step of an agent, as another program writes it."""
    metrics = {
        "prompt_token_ids": context,
        "completion_token_ids": tokens,
        "logprobs": [-0.5] * len(tokens),
        **more.pop("metrics", {}),
    }
    return {"step_id": number, "source": "agent", "message": "", "metrics": metrics, **more}


def atif(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    first = {"step_id": 0, "source": "user", "message": "do it"}
    return {"schema_version": "ATIF-v1.8", "agent": {"name": "other"}, "steps": [first, *steps], **more}


def branch(ids: list[int], mask: list[bool], logprobs: list[float] | None = None) -> dict[str, Any]:
    """Build a message of verifiers that is a branch of its own."""
    own = [-0.5] * sum(mask) if logprobs is None else logprobs
    return {"message": {"role": "user", "content": ""}, "token_ids": ids, "mask": mask, "logprobs": own}


def verifiers(*nodes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"version": 1, "nodes": list(nodes), **more}


def call(node: str, context: list[int], tokens: list[int], mask: list[int], **more: Any) -> dict[str, Any]:
    """Build a turn of OpenEnv's TrainingTrace, whose mask covers prompt and completion."""
    logprobs = {"per_token_logps": [-0.5] * len(tokens)}
    ids = {"prompt_token_ids": context, "completion_token_ids": tokens}
    return {"node_id": node, **ids, **logprobs, "loss_mask": mask, **more}


def openenv(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"schema_version": 1, "turns": list(turns), **more}


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [{"a": value}]
    return value


def test_turns_that_continue_each_other_are_one_sequence() -> None:
    trace = trace_of(atif(step(1, [1, 2], [3, 4]), step(2, [1, 2, 3, 4, 9], [5])), "f")
    (sequence,) = trace.sequences
    assert sequence.token_ids.tolist() == [1, 2, 3, 4, 9, 5]
    assert sequence.loss_mask.tolist() == [False, False, True, True, False, True]


def test_turn_after_another_context_is_a_branch_that_trains_its_own_tokens_only() -> None:
    trace = trace_of(atif(step(1, [1, 2], [3, 4]), step(2, [1, 2, 3, 7], [5])), "f")
    assert [each.loss_mask.tolist() for each in trace.sequences] == [[False, False, True, True], [False] * 4 + [True]]


def test_copied_context_is_not_trained() -> None:
    copied = step(1, [1, 2], [3, 4], is_copied_context=True)
    trace = trace_of(atif(copied, step(2, [1, 2, 3, 4, 9], [5])), "f")
    (sequence,) = trace.sequences
    assert sequence.loss_mask.tolist() == [False] * 5 + [True]


def test_step_without_a_call_of_the_model_has_no_turn() -> None:
    trace = trace_of(
        atif(step(1, [1], [2]), {"step_id": 2, "source": "agent", "message": "", "llm_call_count": 0}), "f"
    )
    assert trace.trained_tokens == 1


def test_tokens_that_branches_share_are_trained_once() -> None:
    mask = [False, True, True]
    trace = trace_of(verifiers(branch([1, 2, 3], mask), branch([1, 2, 4], mask)), "f")
    assert [each.loss_mask.tolist() for each in trace.sequences] == [mask, [False, False, True]]


def test_mask_of_openenv_decides_what_is_trained() -> None:
    asked = {"request": {"messages": [{"role": "user", "content": "do it"}]}}
    turns = (call("a", [1, 2], [3, 4], [0] * 4, **asked), call("b", [1, 2, 3, 4, 9], [5, 6], [0] * 5 + [1, 0]))
    trace = trace_of(openenv(*turns, call("c", [1, 2, 3, 4, 9, 5, 6, 7], [], [0] * 8)), "f")
    (sequence,) = trace.sequences
    assert sequence.token_ids.tolist() == [1, 2, 3, 4, 9, 5, 6]
    assert sequence.loss_mask.tolist() == [False] * 5 + [True, False]
    assert sequence.sampled.tolist() == [False, False, True, True, False, True, True]
    assert (trace.prompt, trace.reward) == ("do it", None)


def test_copied_turn_of_openenv_with_a_mask_of_0_is_context() -> None:
    first, copied = call("a", [1, 2], [3, 4], [0, 0, 1, 1]), call("b", [1, 2], [3, 4], [0] * 4)
    follows = call("c", [1, 2, 3, 4, 9], [5], [0] * 5 + [1])
    for turns in ((first, copied, follows), (copied, first, follows), (copied, follows, first)):
        (sequence,) = trace_of(openenv(*turns), "f").sequences
        assert sequence.loss_mask.tolist() == [False, False, True, True, False, True]
    partly = call("b", [1, 2], [3, 4], [0, 0, 0, 1])
    with pytest.raises(TraceError, match=r"turn 1.*turn 0.*trained twice.*loss_mask"):
        trace_of(openenv(first, partly), "f")


def test_branches_of_a_graph_are_its_paths() -> None:
    first, second = branch([5, 6], [False, True]) | {"parent": 0}, branch([7], [True]) | {"parent": 1}
    summary = branch([8], [True]) | {"parent": 1, "semantic_parents": [{"node": 1, "type": "compaction_attempt"}]}
    trace = trace_of(verifiers(branch([1, 2], [False, False]), first, second, summary), "f")
    assert [each.token_ids.tolist() for each in trace.sequences] == [[1, 2, 5, 6, 7], [1, 2, 5, 6, 8]]
    assert [each.loss_mask.tolist() for each in trace.sequences] == [[*[False] * 3, True, True], [False] * 5]
    assert trace.prompt_tokens.tolist() == [1, 2, 5]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (atif(step(1, [1], [2], metrics={"completion_token_ids": None})), "step 1.*no completion_token_ids"),
        (atif(step(4, [1], [2], metrics={"prompt_token_ids": [-1]})), "step 4.*prompt_token_ids.*at least 0"),
        (atif(step(1, [1], [2], metrics={"logprobs": None})), "step 1.*no logprobs.*loss"),
        (atif(step(1, [1], [2, 3], metrics={"logprobs": [-0.5]})), "logprobs has 1 numbers for 2 tokens"),
        (atif(step(1, [1], [2], metrics={"logprobs": [float("nan")]})), "logprobs.*nan.*finite"),
        (atif(step(1, [1], [2]), step(2, [1], [2])), "step 2.*step 1.*trained twice"),
        (atif(step(1, [1], [])), "step 1.*no completion tokens"),
        (atif(step(1, [], [2])), "step 1.*no prompt tokens"),
        (atif(step(1, [1], [2], llm_call_count=2)), "step 1.*2 calls"),
        (atif(step(1, [1], [2], observation={"results": [{"content": IMAGE}]})), "step 1.*media.*image"),
        (atif(step(1, [1], [2]), {"step_id": 2, "source": "user", "message": IMAGE}), "step 2.*media.*image"),
        (openenv(call("a", [1], [2], [0, 1], request={"messages": [{"content": IMAGE}]})), "turn 0.*media.*image"),
        (atif(), "no step of the agent has token ids"),
        (atif(step(1, [1], [2]), extra={"reward": "good"}), "extra.reward.*good"),
        ({"schema_version": "ATIF-v2.0"}, "schema_version.*ATIF-v2.0"),
        ({"version": 2, "nodes": []}, "version is 2"),
        (verifiers(), "nodes is"),
        (verifiers(branch([1, 2], [False])), "message 0: mask has 1 values for 2 tokens"),
        (verifiers({"token_ids": [1, 2], "mask": [False, True]}), "message 0: no logprobs"),
        (verifiers({"mask": [False, True]}), "message 0: no token_ids"),
        (verifiers(branch([1, 2], [True, False])), "no prompt"),
        (verifiers(branch([1, 2], [False, True]), rewards={"r": {"score": float("inf")}}), "rewards.r.score is inf"),
        (verifiers(branch([1, 2], [False, True]), rewards={"r": {"score": 10**400}}), "score is 1000"),
        (verifiers(branch([1, 2], [False, True], [-(10**400)])), "message 0: logprobs is .*float32"),
        (verifiers(branch([1, 2], [False, True], [0.5])), "log-prob 0.5, above 0"),
        (verifiers(branch([1, 2], [False, True]) | {"parent": 0}), "message 0: parent is 0"),
        (
            verifiers(branch([1, 2, 3, 4, 5], [False, *[True] * 4], [-0.1, -0.1234, -2.5, -0.0001])),
            "rounded to 4 decimals.*float_decimals=None",
        ),
        (atif(step(1, [1], [2], metrics={"logprobs": [0.01]})), "log-prob 0.01, above 0"),
        (atif(step(1, [1], [2]), extra={"relax_actors": {"format": 1, "layout": nested(700)}}), "malformed|nested"),
        (openenv(), "turns is"),
        (openenv(call("a", [1], [2], [0])), "turn 0.*loss_mask has 1 values for 2 tokens"),
        (openenv(call("a", [1], [2], [0, 2])), "turn 0.*loss_mask is .*write 1"),
        (openenv(call("a", [1], [2], [1, 1])), "turn 0.*token 0 of the prompt"),
        (openenv(call("a", [1], [2], [0, 0])), "nothing is trained"),
        (openenv(call("", [1], [2], [0, 1])), "turn 0.*node_id"),
        (openenv(call("a", [1], [2], [0, 1]), call("a", [1, 2], [3], [0, 0, 1])), "turn 1.*node_id 'a'.*turn 0"),
        (openenv(call("a", [1], [2], [0, 1], per_token_logps=None)), "turn 0: no per_token_logps"),
        (openenv(call("a", [1], [2], [0, 1], per_token_logps=[0.5])), "log-prob 0.5, above 0"),
        ({"schema_version": 2, "turns": []}, "schema_version is 2.*OpenEnv"),
        ({"text": "hello"}, "no trace that is known"),
        ([1], "is no trace"),
    ],
)
def test_record_of_another_program_is_refused_where_it_is_wrong(record: object, says: str) -> None:
    with pytest.raises(TraceError, match=f"^file line 3.*{says}"):
        trace_of(record, "file line 3")


def test_base64_of_another_program_is_no_bytes() -> None:
    record = verifiers(branch([1, 2], [False, True]), info={"image": {"base64": "a"}}, nested=nested(700))
    assert trace_of(record, "f").trained_tokens == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metadata", None),
        ("text", None),
        ("messages", ["hello"]),
        ("tools", {}),
        ("sample", "1"),
        ("step", 1.5),
        ("greedy", 0),
        ("reward", 10**400),
        ("metrics", {"turns": 10**400}),
        ("components", {"part": "high"}),
        ("prompt_token_ids", [1.5, 2]),
        ("prompt_token_ids", [-1, 2]),
        ("turn_rewards", [float("nan")]),
        ("metadata", {"base64": "a"}),
        ("metadata", nested(700)),
    ],
)
@pytest.mark.parametrize("kind", ["atif", "verifiers"])
def test_fact_of_another_type_is_refused(kind: str, name: str, value: object) -> None:
    record = FORMATS[kind].record_of(own())
    record["extra" if kind == "atif" else "info"]["relax_actors"][name] = value
    with pytest.raises(TraceError, match=rf"^file line 3.*({name}|malformed|reward of a turn)"):
        trace_of(record, "file line 3")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metadata", "null"),
        ("metadata", '{"a":' * 2000 + "0" + "}" * 2000),
        ("messages", "[1]"),
        ("prompt_tokens", [-1, 2]),
        ("text", None),
        ("sequences", [None]),
        ("sequences", [{"token_ids": [-1], "loss_mask": [False], "logprobs": [0.0], "versions": [-1]}]),
    ],
)
def test_column_of_another_type_is_refused(name: str, value: object) -> None:
    record = FORMATS["parquet"].record_of(own()) | {name: value}
    with pytest.raises(TraceError, match=r"^file row 3"):
        trace_of(record, "file row 3")


@pytest.mark.parametrize(
    "changes",
    [
        {"text": "34"},
        {"turn_rewards": np.array([1], np.float32)},
        {"messages": [{"role": "user", "content": "1"}]},
        {"metrics": {"turns": 1.0}},
        {"spans": np.array([[2, 3], [3, 4]], np.int32)},
    ],
)
def test_checksum_of_a_row_has_all_that_is_trained(changes: dict[str, Any]) -> None:
    spans = {name: changes.pop(name) for name in list(changes) if name == "spans"}
    (sequence,) = own().sequences
    assert own(sequences=(replace(sequence, **spans),), **changes).digest != own().digest


def test_mask_for_other_tokens_is_refused() -> None:
    record = FORMATS["atif"].record_of(own())
    record["extra"]["relax_actors"]["sequences"][0]["trained"] = [[0, 2, 0], [2, 3, 1]]
    with pytest.raises(TraceError, match=r"sequence 0, trained: it is for 3 tokens.*has 4"):
        trace_of(record, "f")


def test_tokens_that_differ_from_the_next_prompt_are_refused() -> None:
    two = TokenSequence(
        np.array([1, 2, 3, 4], np.int32),
        np.array([False, True, False, True]),
        np.array([0, -1, 0, -1], np.float32),
        np.array([-1, 0, -1, 0], np.int32),
    )
    record = FORMATS["atif"].record_of(own(sequences=(two,), prompt_tokens=np.array([1], np.int32)))
    record["steps"][-2]["metrics"]["completion_token_ids"] = [9]
    with pytest.raises(TraceError, match="not the beginning of the next turn"):
        trace_of(record, "f")


def test_mask_of_verifiers_that_was_edited_is_refused() -> None:
    record = FORMATS["verifiers"].record_of(own())
    record["nodes"][1] |= {"mask": [False, True], "logprobs": [-1.0]}
    with pytest.raises(TraceError, match="branch 0: mask does not match"):
        trace_of(record, "f")


def test_loss_mask_of_openenv_that_was_edited_is_refused() -> None:
    record = FORMATS["openenv"].record_of(own())
    record["turns"][0]["loss_mask"][3] = 0
    with pytest.raises(TraceError, match=r"turn 0: loss_mask does not match metadata\.relax_actors"):
        trace_of(record, "f")


def test_trace_that_openenv_cannot_hold_is_refused_by_name() -> None:
    (sequence,) = own().sequences
    above = replace(sequence, logprobs=np.array([0, 0, 1e-6, -1], np.float32))
    with pytest.raises(TraceError, match=r"turn 0.*above 0.*Parquet"):
        FORMATS["openenv"].record_of(own(sequences=(above,)))
    with pytest.raises(TraceError, match=r"no policy sampled.*Parquet"):
        unsampled = replace(sequence, loss_mask=np.zeros(4, np.bool_), versions=np.full(4, -1, np.int32))
        FORMATS["openenv"].record_of(own(sequences=(unsampled,)))


def test_metadata_that_json_would_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="keys that are numbers"):
        write_traces(tmp_path / "a.jsonl", "atif", [own(metadata={"by": {1: "a"}})])
    assert not list(tmp_path.iterdir())


def test_samples_of_a_row_with_other_prompts_are_refused() -> None:
    with pytest.raises(TraceError, match="both are samples of one row"):
        trajectory_of([own(), own(prompt_tokens=np.array([7], np.int32))])


def test_tokens_of_another_text_or_vocabulary_are_refused(tmp_path: Path) -> None:
    tokenizer = digits(tmp_path)
    tokens = tokenizer.encode("12")
    sequence = TokenSequence.of_completion(tokens, tokens, np.zeros(2, np.float32), np.zeros(2, np.int32))
    trace = own(prompt_tokens=tokens, sequences=(sequence,))
    assert checked_text(trace, tokenizer, tokenizer.size).text == "12"
    with pytest.raises(TraceError, match="spell '12', and its text is '34'"):
        checked_text(own(prompt_tokens=tokens, sequences=(sequence,), text="34"), tokenizer, tokenizer.size)
    with pytest.raises(TraceError, match="is none of the 1 tokens"):
        checked_text(trace, tokenizer, 1)


def test_texts_of_turns_are_compared_turn_by_turn(tmp_path: Path) -> None:
    tokenizer = digits(tmp_path)
    ids = {text: tokenizer.encode(text).tolist() for text in ("1", "2>9", "5", "3>9")}
    first = step(1, ids["1"], ids["2>9"]) | {"message": "2"}
    second = step(2, [*ids["1"], *ids["2>9"], *ids["5"]], ids["3>9"]) | {"message": "3"}
    trace = trace_of(atif(first, second), "f")
    assert (trace.text, [message["role"] for message in trace.messages]) == ("23", ["user", "assistant", "assistant"])
    assert checked_text(trace, tokenizer, tokenizer.size).text == "23"
    branches = replace(trace, sequences=trace.sequences[::-1], text="32", messages=trace.messages[::-1])
    assert checked_text(branches, tokenizer, tokenizer.size).text == "32"
    with pytest.raises(TraceError, match="spell '2>93>9', and its text is '24'"):
        checked_text(trace_of(atif(first, second | {"message": "4"}), "f"), tokenizer, tokenizer.size)


def test_many_turns_are_joined_fast_and_too_many_are_refused() -> None:
    context = list(range(400))
    turns = [step(number, context[: number + 1], [500]) for number in range(399)]
    assert len(trace_of(atif(*turns), "f").sequences) == 399
    with pytest.raises(TraceError, match=r"step 501.*more than 500 branches"):
        trace_of(atif(*(step(number, [number], [500]) for number in range(1, 600))), "f")
    with pytest.raises(TraceError, match="10001 turns, more than 10000"):
        trace_of(atif(*(step(number, [number], [500]) for number in range(10_001))), "f")
    with pytest.raises(TraceError, match="more than 500 branches"):
        trace_of(verifiers(*(branch([1, number], [False, True]) for number in range(501))), "f")
