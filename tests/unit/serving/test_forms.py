"""Answers in a form that a client demands: the real SDKs, a real tokenizer, and an engine whose weights are random."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.serving import forms
from relax_actors.serving.tokens import session_token
from tests.support.chat_folder import make_word_folder
from tests.support.engine_policy import EnginePolicy, make_engine
from tests.support.messages import assert_says
from tests.support.scripted_policy import SECRET, TEMPLATE, TOKEN, serve_policy

HEAD = {"Authorization": f"Bearer {TOKEN}"}
CHAT = "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "hi"}]
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS: Any = [tool("multiply", a=NUMBER, b=NUMBER), tool("paint", color={"enum": ["red", "blue"]})]
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}


class Point(BaseModel):
    model_config = ConfigDict(extra="forbid")

    x: int = Field(ge=0, le=999)
    kind: Literal["a", "b"]


SCHEMA = Point.model_json_schema()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    texts = ['{"name": "multiply", "arguments": {"a": 12, "b": 345}}', "red blue color\n"] * 20
    folder = make_word_folder(tmp_path_factory.mktemp("model"), TEMPLATE, ["<|im_end|>"], texts)
    engine, tokenizer = make_engine(folder), Tokenizer(folder)
    with serve_policy(EnginePolicy(engine, tokenizer), tokenizer) as found:
        yield found
    engine.close()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as found:
        yield found


@pytest.fixture
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=TOKEN, max_retries=0) as found:
        yield found


def test_chat_answers_with_json_of_the_schema(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(model="tiny", messages=USER, response_format=Point, n=4, logprobs=True)
    assert {choice.finish_reason for choice in found.choices} == {"stop"}
    points = [choice.message.parsed for choice in found.choices]
    assert all(isinstance(point, Point) for point in points)
    assert len({str(point) for point in points}) > 1, "all seeds give the same"
    for choice in found.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        # Of the whole vocabulary of random weights, also where the grammar leaves one token.
        assert all(entry.logprob < -0.5 for entry in choice.logprobs.content)


def test_chat_streams_json_of_the_schema(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=USER, response_format=Point) as events:
        texts = [event.delta for event in events if event.type == "content.delta"]
        found = events.get_final_completion()
    assert found.choices[0].message.parsed == Point.model_validate_json("".join(texts))
    assert len(texts) > 1


@pytest.mark.slow
def test_json_object_is_an_object_or_is_cut(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": USER, "response_format": {"type": "json_object"}}
    for seed in range(8):
        (choice,) = client.chat.completions.create(**asked, seed=seed, max_tokens=300).choices
        assert choice.message.content is not None
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.finish_reason == "length"
    (choice,) = client.chat.completions.create(**asked, max_tokens=1).choices
    assert (choice.finish_reason, (choice.message.content or "")[0]) == ("length", "{")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_forced_call_is_a_call_whose_arguments_match_the_schema(client: openai.OpenAI, mode: str) -> None:
    names = set()
    for seed, choice in enumerate(["required", {"type": "function", "function": {"name": "paint"}}] * 4):
        asked: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": choice, "seed": seed}
        if mode == "stream":
            with client.chat.completions.stream(**asked) as events:
                found = events.get_final_completion()
        else:
            found = client.chat.completions.create(**asked)
        assert found.choices[0].finish_reason == "tool_calls"
        message = found.choices[0].message
        assert not message.content
        assert message.tool_calls
        for call in message.tool_calls:
            assert call.type == "function"
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        names |= {call.function.name for call in message.tool_calls if choice == "required"}
        if choice != "required":
            assert [call.function.name for call in message.tool_calls] == ["paint"]
    assert names == {"multiply", "paint"}


@pytest.mark.slow
def test_forced_call_may_be_limited_to_one(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": "required", "n": 16}
    counts = []
    for parallel in (True, False):
        found = client.chat.completions.create(**asked, parallel_tool_calls=parallel)
        counts.append({len(choice.message.tool_calls or []) for choice in found.choices})
    assert len(counts[0]) > 1
    assert counts[1] == {1}


def test_answer_with_tools_and_a_schema_is_json_or_calls(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": USER, "tools": TOOLS}
    form: Any = {"type": "json_schema", "json_schema": {"name": "point", "strict": True, "schema": SCHEMA}}
    found = client.chat.completions.create(**asked, response_format=form, n=16)
    for choice in found.choices:
        if not choice.message.tool_calls:
            Point.model_validate_json(choice.message.content or "")
        else:
            assert not choice.message.content
    assert {choice.finish_reason for choice in found.choices} == {"stop", "tool_calls"}


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_responses_have_the_demanded_form(client: openai.OpenAI, mode: str) -> None:
    asked: Any = {"model": "tiny", "input": "hi"}
    if mode == "stream":
        with client.responses.stream(**asked, text_format=Point) as events:
            found = events.get_final_response()
    else:
        found = client.responses.parse(**asked, text_format=Point)
    assert isinstance(found.output_parsed, Point)
    tools: Any = [{"type": "function", "strict": True, **one["function"]} for one in TOOLS]
    for choice in ("required", {"type": "function", "name": "multiply"}):
        asked |= {"tools": tools, "tool_choice": choice}
        answer = client.responses.create(**asked)
        assert answer.output
        for item in answer.output:
            assert item.type == "function_call"
            jsonschema.validate(json.loads(item.arguments), SCHEMAS[item.name])
        shown = answer.tool_choice
        assert (shown if isinstance(shown, str) else shown.to_dict()) == choice
    cut = client.responses.create(
        model="tiny", input="hi", max_output_tokens=1, text={"format": {"type": "json_object"}}
    )
    assert cut.status == "incomplete"


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_messages_have_the_demanded_form(claude: anthropic.Anthropic, mode: str) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 1000, "messages": USER}

    def answer(**more: Any) -> anthropic.types.Message:
        if mode == "whole":
            return claude.messages.create(**asked, **more)
        with claude.messages.stream(**asked, **more) as events:
            return events.get_final_message()

    found = answer(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    (block,) = found.content
    assert block.type == "text"
    Point.model_validate_json(block.text)
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "paint"}):
        found = answer(tools=tools, tool_choice=choice)
        (block,) = found.content
        assert block.type == "tool_use"
        jsonschema.validate(block.input, SCHEMAS[block.name])
        assert block.name == choice.get("name", block.name)
        assert found.stop_reason == "tool_use"


MANY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
LIST = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}


def schema_form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (schema_form({"type": "nope"}), ["schema of the answer", "nope", "simplify"]),
        (schema_form({"not": {"type": "string"}}), ["not", "simplify"]),
        (schema_form({"type": "string", "enum": []}), ["schema of the answer"]),
        (schema_form(LOOP), ["no token", "simplify"]),
        (schema_form({"enum": [f"value{i}" for i in range(20_000)]}), ["65536", "shorten"]),
        (schema_form({"$ref": "https://127.0.0.1/schema.json"}), ["https://127.0.0.1/schema.json"]),
        (schema_form({"allOf": [{"type": "string", "pattern": f"(.*{c}.*){{10}}"} for c in "abcdefgh"]}), ["simplify"]),
        (schema_form([1]), ["response_format", "object"]),
        ({"response_format": {"type": "grammar"}}, ["response_format", "json_schema"]),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}, ["'add'", "tools"]),
        ({"tool_choice": "required"}, ["tool_choice", "tools"]),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, ["tool_choice", "custom", "required"]),
        ({"tools": [LIST], "tool_choice": "required"}, ["'f'", "object"]),
    ],
)  # fmt: skip
def test_form_that_cannot_be_met_is_refused_with_its_reason(url: str, given: dict[str, Any], words: list[str]) -> None:
    answer = httpx.post(f"{url}{CHAT}", headers=HEAD, json={"messages": USER, **given}, timeout=60)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert_says(message, *words)


def test_gateway_answers_others_while_it_compiles(url: str) -> None:
    body = {"messages": USER, **schema_form(MANY | {"title": "other"})}
    with httpx.Client(headers=HEAD, timeout=60) as http:
        slow = threading.Thread(target=lambda: http.post(f"{url}{CHAT}", json=body))
        slow.start()
        longest = 0.0
        while slow.is_alive() or not longest:
            start = time.monotonic()
            assert http.get(f"{url}/health").status_code == 200
            longest = max(longest, time.monotonic() - start)
        slow.join()
    assert longest < 1.0


def test_schema_that_takes_long_to_compile_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "COMPILE_SECONDS", 1e-4)
    body = {"messages": USER, **schema_form(SCHEMA | {"description": "takes more than 0.1 ms"})}
    answer = httpx.post(f"{url}{CHAT}", headers=HEAD, json=body, timeout=60)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert_says(message, "compile", "0.0001 s", "simplify")


def test_session_refuses_forms_with_the_reason(url: str) -> None:
    session = "group-3-1-0-0"
    head = {"Authorization": f"Bearer {session_token(SECRET, session)}"}
    for given in (schema_form(SCHEMA), {"tools": TOOLS, "tool_choice": "required"}):
        body = {"messages": USER, **given}
        answer = httpx.post(f"{url}/sessions/{session}{CHAT}", headers=head, json=body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400
        assert_says(message, "session", "trained", "off-policy correction", "leave them out")
