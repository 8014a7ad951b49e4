"""Grammars of answers: whatever a model samples within them is JSON of the schema, or a call that the parsers read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_actors.data.answer_form import Form, Thinking, grammar_of
from relax_actors.data.character_tokenizer import make_character_tokenizer
from relax_actors.data.grammar import GrammarError, Grammars
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.data.tool_call import ToolCall, ToolFormat, format_of
from relax_actors.data.tool_calls import parse_answer
from relax_actors.errors import ConfigError, RowError
from relax_actors.messages.generate import MAX_GRAMMAR
from tests.support.chat_folder import make_chat_folder, make_word_folder
from tests.support.chat_templates import MISTRAL
from tests.support.messages import assert_says
from tests.support.scripted_policy import TEMPLATE
from tests.support.tool_calls import write_calls

BOOLEAN = {"$ref": "#/$defs/flag"}
MULTIPLY = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"type": "string", "enum": ["x", "y"]},
        "exact": BOOLEAN,
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
SAY = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
PARAMETERS = {"multiply": MULTIPLY, "say": SAY, "ping": None}
TOOLS = [
    {"type": "function", "function": {"name": name} | ({} if schema is None else {"parameters": schema})}
    for name, schema in PARAMETERS.items()
]
TEMPLATES = {
    "hermes": TEMPLATE,
    "xml": "<tool_call><function=",
    "llama": "<|python_tag|>ipython",
    "mistral": MISTRAL,
    "mistral-args": MISTRAL + "{# [ARGS] #}",
    "mistral-id": MISTRAL + "{# [CALL_ID] [ARGS] #}",
}
TEXTS = ['{"name": "multiply", "arguments": {"a": 12}}', "<function=say>\n<parameter=text>\n"] * 20
KINDS = [f"{vocabulary}/{family}" for vocabulary in ("characters", "words") for family in TEMPLATES]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Tokenizer of a family, of single characters or of words and marks."""
    vocabulary, _, family = request.param.partition("/")
    folder, template, stops = tmp_path_factory.mktemp("model"), TEMPLATES[family], ["<|im_end|>"]
    if vocabulary == "characters":
        return Tokenizer(make_chat_folder(folder, template, stops))
    return Tokenizer(make_word_folder(folder, template, stops, TEXTS))


def walk(tokenizer: Tokenizer, grammar: str, seed: int, most: int = 3000) -> str | None:
    """Text of a random walk within a grammar; None if it has not ended."""
    state, tokens, chance = Grammars(tokenizer).begin(grammar), [], random.Random(seed)
    while not state.is_over:
        if len(tokens) == most:
            return None
        token = chance.choice(np.flatnonzero(state.allowed()).tolist())
        state.advance(token)
        tokens.append(token)
    return tokenizer.spell(tokens)


def check_calls(tokenizer: Tokenizer, text: str, *, thinks: bool = False) -> list[str]:
    """Check that a text is well-formed calls and nothing else; returns their names."""
    parsed = parse_answer(text, format_of(tokenizer.chat_template), TOOLS, thinks=thinks)
    assert not parsed.malformed, text
    assert not parsed.content, text
    for call in parsed.calls:
        jsonschema.validate(call.arguments, PARAMETERS[call.name] or {"type": "object", "maxProperties": 0})
    return [call.name for call in parsed.calls]


@pytest.mark.slow
def test_forced_calls_are_read_by_the_parser_of_the_family(tokenizer: Tokenizer) -> None:
    family = format_of(tokenizer.chat_template)
    grammar = grammar_of(Form(forces_call=True), TOOLS, tokenizer, family, Thinking.NONE)
    found = [check_calls(tokenizer, text) for seed in range(40) if (text := walk(tokenizer, grammar, seed))]
    # A random walk does not find the tag that closes a text.
    unclosed = {"say"} if family is ToolFormat.QWEN_XML else set()
    assert {name for names in found for name in names} == set(PARAMETERS) - unclosed
    assert min(map(len, found)) == 1
    assert max(map(len, found)) > 1
    once = grammar_of(Form(forces_call=True, calls_once=True), TOOLS, tokenizer, family, Thinking.NONE)
    texts = [text for seed in range(20) if (text := walk(tokenizer, once, seed))]
    assert {len(check_calls(tokenizer, text)) for text in texts} == {1}
    named = grammar_of(Form(forces_call=True, tool="multiply"), TOOLS, tokenizer, family, Thinking.NONE)
    for seed in range(20):
        text = walk(tokenizer, named, seed)
        assert text is not None
        assert check_calls(tokenizer, text) == ["multiply"]


def test_text_between_tags_ends_at_its_closing_tag(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_word_folder(tmp_path, TEMPLATES["xml"], ["<|im_end|>"], TEXTS))
    call = ToolCall("say", {"text": '</p> and\n\n<b> "é"'})
    form = Form(forces_call=True, tool="say")
    state = Grammars(tokenizer).begin(grammar_of(form, TOOLS, tokenizer, ToolFormat.QWEN_XML, Thinking.NONE))
    for token in tokenizer.encode(write_calls([call], ToolFormat.QWEN_XML), special=False).tolist():
        assert state.allowed()[token], tokenizer.spell([token])
        state.advance(token)
    assert np.flatnonzero(state.allowed()).tolist() == sorted(tokenizer.stop_ids)


def test_reasoning_precedes_the_form(tokenizer: Tokenizer) -> None:
    family = format_of(tokenizer.chat_template)
    form = Form(forces_call=True, tool="ping")
    for thinking, begun in ((Thinking.OPENED, ""), (Thinking.POSSIBLE, "<think>")):
        state = Grammars(tokenizer).begin(grammar_of(form, TOOLS, tokenizer, family, thinking))
        for token in tokenizer.encode(f"{begun}I say {{ or [.</think>\n\n", special=False).tolist():
            assert state.allowed()[token], tokenizer.spell([token])
            state.advance(token)
        tokens = []
        while not state.is_over:
            tokens.append(int(np.flatnonzero(state.allowed())[0]))
            state.advance(tokens[-1])
        assert check_calls(tokenizer, f"{begun}I say.</think>{tokenizer.spell(tokens)}", thinks=not begun) == ["ping"]


def test_mark_that_is_a_token_is_not_spelled(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_word_folder(tmp_path, TEMPLATE, ["<|im_end|>"], TEXTS))
    grammar = grammar_of(Form(forces_call=True), TOOLS, tokenizer, ToolFormat.HERMES, Thinking.NONE)
    allowed = np.flatnonzero(Grammars(tokenizer).begin(grammar).allowed())
    assert allowed.tolist() == [tokenizer.token_id("<tool_call>")]


SMALL = st.deferred(
    lambda: (
        st.just({"type": "boolean"})
        | st.just({"type": "null"})
        | st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 120})
        | st.integers(0, 5).map(lambda most: {"type": "string", "maxLength": most})
        | st.just({"type": "string", "pattern": "^[a-c]{1,4}$"})
        | st.lists(st.integers(0, 99) | st.text('ab"\\é\n', max_size=4), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        )
        | st.tuples(SMALL, st.integers(0, 2)).map(lambda a: {"type": "array", "items": a[0], "maxItems": a[1]})
        | st.lists(SMALL, min_size=1, max_size=2).map(lambda options: {"anyOf": options})
        | st.tuples(st.dictionaries(st.sampled_from("abc"), SMALL, max_size=3), st.booleans()).map(
            lambda pair: {
                "type": "object",
                "properties": pair[0],
                "required": sorted(pair[0]) if pair[1] else [],
                "additionalProperties": False,
            }
        )
    )
)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_word_folder(tmp_path_factory.mktemp("words"), TEMPLATE, ["<|im_end|>"], TEXTS))


@settings(max_examples=60, deadline=None)
@given(SMALL, st.integers(0, 1000))
def test_json_matches_its_schema(words: Tokenizer, schema: dict[str, Any], seed: int) -> None:
    text = walk(words, grammar_of(Form(schema), [], words, None, Thinking.NONE), seed)
    assert text is not None
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("parameters", "name", "words_of_error"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}, "f", ["'a'", "'f'", "pattern"]),
        ({"type": "object", "anyOf": [{}]}, "f", ["'f'", "anyOf", "tool_choice auto"]),
        ({"type": "object", "required": ["b"]}, "f", ["'f'", "'b'", "properties"]),
        ({"type": "object"}, "a name", ["'a name'", "letters"]),
        ({"type": "array"}, "f", ["'f'", "type object"]),
    ],
)
def test_call_that_tags_cannot_hold_to_its_schema_is_refused(
    tmp_path: Path, parameters: dict[str, Any], name: str, words_of_error: list[str]
) -> None:
    tokenizer = Tokenizer(make_chat_folder(tmp_path, TEMPLATES["xml"], ["<|im_end|>"]))
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}}]
    with pytest.raises(RowError) as found:
        grammar_of(Form(forces_call=True), tools, tokenizer, ToolFormat.QWEN_XML, Thinking.NONE)
    assert_says(found.value, *words_of_error)


def test_grammar_that_the_vocabulary_cannot_spell_is_refused(tmp_path: Path) -> None:
    grammars = Grammars(Tokenizer(make_chat_folder(tmp_path, TEMPLATE, ["<|im_end|>"])))
    with pytest.raises(GrammarError, match="no token"):
        grammars.begin('start: "é"')
    with pytest.raises(GrammarError, match="nope"):
        grammars.begin('start: value\nvalue: %json {"type": "nope"}')


def test_object_whose_braces_the_vocabulary_lacks_is_refused(tmp_path: Path) -> None:
    make_character_tokenizer("0123456789 #", "#", tmp_path)
    with pytest.raises(RowError, match=r"[{]"):
        grammar_of(Form(schema={"type": "object"}), [], Tokenizer(tmp_path), None, Thinking.NONE)


def test_model_without_stop_token_is_refused(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path, TEMPLATE, ["<|im_end|>"])
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="eos_token_id"):
        Grammars(Tokenizer(folder)).begin('start: "a"')


def test_largest_grammars_compile_within_bounds(words: Tokenizer) -> None:
    """Whatever a client writes in so many characters is compiled or refused in seconds."""
    hostile = ["(((a{100}){100}){100}){100}", "(a|b)*a(a|b){40}", "(.*a.*b.*c){30}"]
    schemas: list[Any] = [{"type": "string", "pattern": pattern} for pattern in hostile]
    schemas += [{"enum": [f"value{i}" for i in range(4000)]}, {"type": "array", "minItems": 10**9}]
    for schema in schemas:
        grammar = grammar_of(Form(schema), [], words, None, Thinking.NONE)
        assert len(grammar) < MAX_GRAMMAR
        try:
            state = Grammars(words).begin(grammar)
            for _ in range(50):
                state.advance(int(np.flatnonzero(state.allowed())[0]))
        except GrammarError:
            continue
