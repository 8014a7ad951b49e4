"""The real SDKs of OpenAI and Anthropic against the gateway: text, tool loops, streams and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from relax_actors.serving.tokens import session_token
from tests.support.scripted_policy import SECRET, TOKEN, ScriptedPolicy, serve

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


def says(prompt: str) -> str:
    """Call the tool first, then repeat its result."""
    if "<|im_start|>tool\n" in prompt:
        return f"It is {prompt.split('<|im_start|>tool')[1].split('<|im_end|>', maxsplit=1)[0].strip()}."
    if "choices" in prompt:
        return "Choice INDEX."
    if "twice" in prompt:
        return f"I multiply. {CALL}\n{CALL}"
    if "react" in prompt:
        return f"{REACT} invented\nObservation: again"
    return f"I multiply. {CALL}" if "multiply" in prompt else "Hello."


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ScriptedPolicy]]:
    with serve(tmp_path_factory.mktemp("model"), says) as found:
        yield found


@pytest.fixture(params=["free", "session"])
def base(gateway: tuple[str, ScriptedPolicy], request: pytest.FixtureRequest) -> tuple[str, str]:
    """Address and key of the gateway itself, and of one of its sessions."""
    url, _ = gateway
    session = "group-3-1-0-0"
    if request.param == "free":
        return url, TOKEN
    return f"{url}/sessions/{session}", session_token(SECRET, session)


def openai_client(base: tuple[str, str]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base[0]}/v1", api_key=base[1], max_retries=0)


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_openai_sdk_runs_a_tool_loop(base: tuple[str, str], mode: str) -> None:
    with openai_client(base) as client:
        messages: list = [{"role": "user", "content": "What is 6 times 7? Use multiply."}]
        for _ in range(4):
            if mode == "stream":
                with client.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS) as events:
                    completion = events.get_final_completion()
            else:
                completion = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
            message = completion.choices[0].message
            messages.append(message.to_dict())
            if not message.tool_calls:
                break
            assert completion.choices[0].finish_reason == "tool_calls"
            (call,) = message.tool_calls
            given = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] * given["b"])})
    assert message.content == "It is 42."
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert completion.system_fingerprint == f"v7-{'f' * 16}"


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_openai_sdk_runs_a_tool_loop_with_responses(base: tuple[str, str], mode: str) -> None:
    tools = [{"type": "function", "strict": False, **TOOLS[0]["function"]}]
    with openai_client(base) as client:
        items: list = [{"role": "user", "content": "What is 6 times 7? Use multiply."}]
        for _ in range(4):
            if mode == "stream":
                with client.responses.stream(model="tiny", input=items, tools=tools) as events:
                    kinds = [event.type for event in events]
                    found = events.get_final_response()
                assert kinds[-1] == "response.completed"
            else:
                found = client.responses.create(model="tiny", input=items, tools=tools, instructions="Be short.")
            items += [item.to_dict() for item in found.output]
            calls = [item for item in found.output if item.type == "function_call"]
            if not calls:
                break
            given = json.loads(calls[0].arguments)
            output = str(given["a"] * given["b"])
            items.append({"type": "function_call_output", "call_id": calls[0].call_id, "output": output})
    assert found.output_text == "It is 42."
    assert found.usage.output_tokens == len("It is 42.") + 1


REACT = "Thought: add.\nObservation:"
WITHOUT = "Thought: add."


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_stop_strings_are_not_in_the_content(base: tuple[str, str], mode: str) -> None:
    messages: list = [{"role": "user", "content": "react"}]
    given: dict = {"model": "tiny", "messages": messages}
    with openai_client(base) as client:
        if mode == "stream":
            chunks = list(client.chat.completions.create(**given, stop=["\nObservation:", "never"], stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            choice = client.chat.completions.create(**given, stop=["\nObservation:", "never"]).choices[0]
            text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == (WITHOUT, "stop")
    with anthropic.Anthropic(base_url=base[0], api_key=base[1], max_retries=0) as sdk:
        given |= {"max_tokens": 500, "stop_sequences": ["\nObservation:", "never"]}
        if mode == "stream":
            with sdk.messages.stream(**given) as events:
                text = "".join(events.text_stream)
                found = events.get_final_message()
            assert text == WITHOUT
        else:
            found = sdk.messages.create(**given)
        (block,) = found.content
        assert block.type == "text"
        assert (block.text, found.stop_reason, found.stop_sequence) == (WITHOUT, "stop_sequence", "\nObservation:")
        ended = sdk.messages.create(**given | {"stop_sequences": ["never"]})
        assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)


def test_stop_string_within_a_tool_call_leaves_the_call(base: tuple[str, str]) -> None:
    with openai_client(base) as client:
        messages: list = [{"role": "user", "content": "multiply"}]
        found = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, stop="</tool_call>")
    message = found.choices[0].message
    assert (message.content, found.choices[0].finish_reason) == ("I multiply.", "tool_calls")
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("multiply", {"a": 6, "b": 7})
    assert re.fullmatch("[A-Za-z0-9]{9}", call.id), "Mistral's templates demand this form"


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_client_that_wants_one_tool_call_gets_the_first(
    base: tuple[str, str], gateway: tuple[str, ScriptedPolicy], mode: str
) -> None:
    messages: list = [{"role": "user", "content": "twice, multiply"}]
    with openai_client(base) as client:
        given: dict = {"model": "tiny", "messages": messages, "tools": TOOLS, "parallel_tool_calls": False}
        if mode == "stream":
            with client.chat.completions.stream(**given) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**given).choices[0]
        whole = client.chat.completions.create(**given | {"parallel_tool_calls": True}).choices[0]
        tools: list = [{"type": "function", "strict": False, **TOOLS[0]["function"]}]
        found = client.responses.create(model="tiny", input=messages, tools=tools, parallel_tool_calls=False)
    assert choice.message.content == "I multiply."
    assert len(choice.message.tool_calls or []) == 1
    assert len(whole.message.tool_calls or []) == 2
    assert [item.type for item in found.output] == ["message", "function_call"]
    assert not found.parallel_tool_calls
    with anthropic.Anthropic(base_url=base[0], api_key=base[1], max_retries=0) as sdk:
        schema = TOOLS[0]["function"]["parameters"]
        choice_of_tools: dict = {"type": "auto", "disable_parallel_tool_use": True}
        offered: list = [{"name": "multiply", "input_schema": schema}]
        asked: dict = {"max_tokens": 500, "messages": messages, "tools": offered, "tool_choice": choice_of_tools}
        answer = sdk.messages.create(model="tiny", **asked)
    assert [block.type for block in answer.content] == ["text", "tool_use"]
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
    assert [call.ends for call in gateway[1].calls[-4:]] == [["</tool_call>"], [], ["</tool_call>"], ["</tool_call>"]]


def test_one_tool_call_is_refused_where_calls_have_no_closing_mark(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}[TOOL_CALLS]{% endif %}"
    with serve(tmp_path, lambda _: "Hello.", template=template) as (url, policy), openai_client((url, TOKEN)) as client:
        asked: dict = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "parallel_tool_calls": False}
        with pytest.raises(openai.BadRequestError, match=r"parallel_tool_calls = false.*mistral.*no closing mark"):
            client.chat.completions.create(**asked, tools=TOOLS)
        assert not policy.calls
        assert client.chat.completions.create(**asked).choices[0].message.content == "Hello.", "no tools, no calls"


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_several_answers_to_one_request_come_in_order(
    base: tuple[str, str], gateway: tuple[str, ScriptedPolicy], mode: str
) -> None:
    given: dict = {"model": "tiny", "messages": [{"role": "user", "content": "choices"}], "n": 3}
    before = len(gateway[1].calls)
    with openai_client(base) as client:
        if mode == "stream":
            texts = ["", "", ""]
            for chunk in client.chat.completions.create(**given, stream=True):
                for one in chunk.choices:
                    texts[one.index] += one.delta.content or ""
        else:
            found = client.chat.completions.create(**given).choices
            assert [one.index for one in found] == [0, 1, 2]
            texts = [one.message.content or "" for one in found]
    if "/sessions/" in base[0]:
        assert texts == ["Choice 0.", "Choice 1.", "Choice 2."]
        assert [call.n for call in gateway[1].calls[before:]] == [3], "one call, so that its answers are one unit"
    else:
        assert texts == ["Choice 0."] * 3
        assert [call.n for call in gateway[1].calls[before:]] == [1, 1, 1]


def test_all_apis_name_the_player_of_a_session(gateway: tuple[str, ScriptedPolicy]) -> None:
    url, policy = gateway
    session = "group-3-1-0-0"
    own, head = (f"{url}/sessions/{session}", session_token(SECRET, session)), {"X-Relax-Player": "critic"}
    user: list = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=f"{own[0]}/v1", api_key=own[1], max_retries=0, default_headers=head) as client:
        client.responses.create(model="tiny", input=user)
        client.completions.create(model="tiny", prompt="hi")
        client.chat.completions.create(model="tiny", messages=user, extra_headers={"X-Relax-Player": "solver"})
    with anthropic.Anthropic(base_url=own[0], api_key=own[1], max_retries=0) as sdk:
        sdk.messages.create(model="tiny", max_tokens=50, messages=user, extra_headers=head)
    assert [call.player for call in policy.calls[-4:]] == ["critic", "critic", "solver", "critic"]
    assert policy.calls[-3].text == "hi"


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_stop_string_of_a_text_completion_is_not_in_the_text(gateway: tuple[str, ScriptedPolicy], mode: str) -> None:
    with openai_client((gateway[0], TOKEN)) as client:
        if mode == "stream":
            parts = client.completions.create(model="tiny", prompt="react", stop="\nObservation:", stream=True)
            text = "".join(part.choices[0].text for part in parts)
        else:
            text = client.completions.create(model="tiny", prompt="react", stop="\nObservation:").choices[0].text
    assert text == WITHOUT


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_anthropic_sdk_runs_a_tool_loop(base: tuple[str, str], mode: str) -> None:
    function = TOOLS[0]["function"]
    tools = [{"name": "multiply", "description": "Multiply.", "input_schema": function["parameters"]}]
    with anthropic.Anthropic(base_url=base[0], api_key=base[1], max_retries=0) as client:
        messages: list = [{"role": "user", "content": "What is 6 times 7? Use multiply."}]
        for _ in range(4):
            given = {"model": "tiny", "max_tokens": 500, "messages": messages, "tools": tools, "system": "Be short."}
            if mode == "stream":
                with client.messages.stream(**given) as events:
                    found = events.get_final_message()
            else:
                found = client.messages.create(**given)
            messages.append({"role": "assistant", "content": [block.to_dict() for block in found.content]})
            calls = [block for block in found.content if block.type == "tool_use"]
            if not calls:
                break
            assert found.stop_reason == "tool_use"
            result = str(calls[0].input["a"] * calls[0].input["b"])
            block = {"type": "tool_result", "tool_use_id": calls[0].id, "content": result}
            messages.append({"role": "user", "content": [block]})
        counted = client.messages.count_tokens(model="tiny", messages=messages[:1])
    assert (found.content[0].text, found.stop_reason) == ("It is 42.", "end_turn")
    assert counted.input_tokens > 20


def test_logprobs_and_token_ids_are_those_of_the_policy(gateway: tuple[str, ScriptedPolicy]) -> None:
    url, policy = gateway
    with openai_client((url, TOKEN)) as client:
        found = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            logprobs=True,
            n=2,
            seed=5,
            temperature=0.5,
            extra_body={"return_token_ids": True},
        )
    assert [call.seed for call in policy.calls[-2:]] == [5, 6]
    assert [call.temperature for call in policy.calls[-2:]] == [0.5, 0.5]
    assert found.model_extra is not None
    assert found.model_extra["prompt_token_ids"] == policy.calls[-1].tokens.tolist()
    for choice in found.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert "".join(entry.token for entry in choice.logprobs.content) == "Hello.<|im_end|>"
        assert {entry.logprob for entry in choice.logprobs.content} == {-0.25}
        assert len(choice.model_extra["token_ids"]) == len("Hello.") + 1
    assert found.usage is not None
    assert found.usage.completion_tokens == 2 * (len("Hello.") + 1)


def test_text_completions_and_streams_of_them(base: tuple[str, str]) -> None:
    with openai_client(base) as client:
        whole = client.completions.create(model="tiny", prompt="hi", logprobs=1, max_tokens=3)
        parts = list(client.completions.create(model="tiny", prompt=[1, 2, 3], stream=True))
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Hel", "length")
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.text_offset == [0, 1, 2]
    assert "".join(part.choices[0].text for part in parts) == "Hello."


def test_models_name_the_context_length(gateway: tuple[str, ScriptedPolicy]) -> None:
    with openai_client((gateway[0], TOKEN)) as client:
        (model,) = client.models.list().data
    assert (model.id, model.to_dict()["max_model_len"]) == ("tiny", 4096)


def test_errors_reach_both_sdks_in_their_own_form(gateway: tuple[str, ScriptedPolicy]) -> None:
    url, _ = gateway
    with openai_client((url, TOKEN)) as client, pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], top_logprobs=3)
    assert bad.value.body == {
        "message": "top_logprobs is not supported: the engine records the sampled token's log-prob alone; leave it out",
        "type": "invalid_request_error",
        "param": None,
        "code": "unsupported_parameter",
    }
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as denied,
    ):
        client.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
    assert denied.value.body == {
        "type": "error",
        "error": {
            "type": "authentication_error",
            "message": "no valid token; send the gateway's token as `Authorization: Bearer <token>`",
        },
    }
    other = f"{url}/sessions/group-9-9-9-0"
    with (
        openai_client((other, session_token(SECRET, "group-1-1-1-0"))) as client,
        pytest.raises(
            openai.PermissionDeniedError,
            match="not that of session 'group-9-9-9-0'",
        ),
    ):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
