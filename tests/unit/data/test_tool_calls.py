"""Tool calls of the model families: parsed, written, and malformed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_actors.data.tool_call import ToolCall, ToolFormat, format_of
from relax_actors.data.tool_call_parsers import MAX_CALLS
from relax_actors.data.tool_calls import parse_answer, split_reasoning
from tests.support.messages import assert_says
from tests.support.tool_calls import write_calls

TEXT = {"type": "string"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}}
            },
        },
    }
]
ADD = ToolCall("add", {"a": 1, "b": 2})
TEXTS = {
    ToolFormat.HERMES: '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    ToolFormat.QWEN_XML: (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    ToolFormat.LLAMA_JSON: '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    ToolFormat.MISTRAL: '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]',
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PIECES = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "{",
    "}",
    "[",
    ";",
    "NaN",
    "</think>",
    "<think>",
    "<function=x>",
]
PIECES += ["</function>", "<parameter=y>", "</parameter>", '"name"', "\n"]
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
CALLS = st.lists(
    st.builds(
        ToolCall,
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
        st.dictionaries(st.text(max_size=6), VALUES, max_size=3),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_call_is_parsed_and_written_as_the_family_does(tool_format: ToolFormat) -> None:
    assert write_calls([ADD], tool_format) == TEXTS[tool_format]
    found = parse_answer(TEXTS[tool_format], tool_format, TOOLS)
    assert (found.content, found.calls, found.malformed) == ("", (ADD,), ())


@pytest.mark.parametrize("tool_format", [f for f in ToolFormat if f is not ToolFormat.QWEN_XML])
@settings(max_examples=30, deadline=None)
@given(calls=CALLS)
def test_json_formats_give_back_any_calls(tool_format: ToolFormat, calls: list[ToolCall]) -> None:
    found = parse_answer(write_calls(calls, tool_format), tool_format)
    assert (list(found.calls), found.malformed, found.content) == (calls, (), "")


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(exclude_characters="<"), max_size=20), st.integers(), st.integers())
def test_xml_format_gives_back_texts_and_numbers(note: str, a: int, b: int) -> None:
    call = ToolCall("add", {"note": note, "a": a, "b": b})
    assert parse_answer(write_calls([call, call], ToolFormat.QWEN_XML), ToolFormat.QWEN_XML, TOOLS).calls == (
        call,
        call,
    )


@pytest.mark.parametrize("tool_format", ToolFormat)
@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.sampled_from([*TEXTS.values(), *PIECES]) | st.text(max_size=3),
        max_size=8,
    )
)
def test_any_text_is_taken_apart(tool_format: ToolFormat, parts: list[str]) -> None:
    found = parse_answer("".join(parts), tool_format, TOOLS)
    assert all(isinstance(call.arguments, dict) and call.name for call in found.calls)


def test_text_around_calls_is_content_and_reasoning_holds_no_calls() -> None:
    text = f"<think>maybe {TEXTS[ToolFormat.HERMES]}</think>I add.\n{TEXTS[ToolFormat.HERMES]}\nDone."
    found = parse_answer(text, ToolFormat.HERMES)
    assert found.calls == (ADD,)
    assert found.content == "I add.\n\nDone."
    assert found.reasoning.startswith("maybe <tool_call>")


def test_reasoning_that_the_prompt_opened_or_that_never_ends() -> None:
    assert split_reasoning("sum\n</think>\n3") == ("sum", "\n3")
    assert split_reasoning("<think>on and on") == ("on and on", "")
    assert split_reasoning("3") == ("", "3")
    call = write_calls([ToolCall("say", {"text": "</think>"})], ToolFormat.HERMES)
    assert parse_answer(call, ToolFormat.HERMES).calls == (ToolCall("say", {"text": "</think>"}),)


@pytest.mark.parametrize(
    ("tool_format", "text", "why"),
    [
        (ToolFormat.HERMES, "<tool_call>\n{'a': 1}\n</tool_call>", "it is not valid JSON (Expecting property name"),
        (ToolFormat.HERMES, '<tool_call>{"name": "f", "arguments": 3}</tool_call>', "its arguments are not an object"),
        (ToolFormat.HERMES, '<tool_call>{"arguments": {}}</tool_call>', 'it has no "name"'),
        (ToolFormat.HERMES, '<tool_call>{"name": "f"}', "</tool_call> does not follow its object"),
        (ToolFormat.HERMES, "<tool_call>" + "[" * 100_000, "it is nested too deeply"),
        (ToolFormat.QWEN_XML, "<tool_call><function=f>", "it is not one <function=...> closed by"),
        (ToolFormat.QWEN_XML, TEXTS[ToolFormat.QWEN_XML].replace("1", "one"), "parameter 'a': it is not valid JSON"),
        (ToolFormat.LLAMA_JSON, '{"name": "f", "parameters": {', "it is not valid JSON"),
        (ToolFormat.LLAMA_JSON, TEXTS[ToolFormat.LLAMA_JSON] + " and so on", "text follows a call"),
        (ToolFormat.MISTRAL, "[TOOL_CALLS]f(1)", "it is not valid JSON"),
    ],
)
def test_malformed_call_is_explained_to_the_model(tool_format: ToolFormat, text: str, why: str) -> None:
    (bad,) = parse_answer(text, tool_format, TOOLS).malformed
    assert why in bad.error
    assert bad.error.startswith("the tool call ")
    assert "; write " in bad.error


def test_whole_message_of_a_malformed_call() -> None:
    (bad,) = parse_answer("<tool_call>{]</tool_call>", ToolFormat.HERMES).malformed
    assert_says(bad.error, "<tool_call>{]</tool_call>", "not valid JSON", "character 2", '"arguments"')


def test_good_calls_beside_a_malformed_one_and_too_many_calls() -> None:
    found = parse_answer(f"<tool_call>oops</tool_call>{TEXTS[ToolFormat.HERMES]}", ToolFormat.HERMES)
    assert (found.calls, len(found.malformed)) == ((ADD,), 1)
    many = parse_answer(TEXTS[ToolFormat.HERMES] * (MAX_CALLS + 3), ToolFormat.HERMES)
    assert (len(many.calls), len(many.malformed)) == (MAX_CALLS, 1)


def test_other_spellings_of_the_families() -> None:
    named = '[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'
    assert parse_answer(named, ToolFormat.MISTRAL).calls == (ADD, ADD)
    tagged = '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}'
    assert parse_answer(tagged, ToolFormat.LLAMA_JSON).calls == (ADD,)
    as_text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>'
    assert parse_answer(as_text, ToolFormat.HERMES).calls == (ADD,)
    assert parse_answer('{"sum": 3}', ToolFormat.LLAMA_JSON).content == '{"sum": 3}'


def test_format_follows_from_the_template() -> None:
    assert format_of("... <tool_call>\n<function=example>") is ToolFormat.QWEN_XML
    assert format_of("... <tool_call>") is ToolFormat.HERMES
    assert format_of("[TOOL_CALLS]") is ToolFormat.MISTRAL
    assert format_of("Environment: ipython") is ToolFormat.LLAMA_JSON
    assert format_of("<|im_start|>") is None
    assert parse_answer(" text ", None).content == "text"
