"""Streams of the gateway with the real SDKs: text leaves as it is generated, and a client that leaves ends it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.data.tool_call import ToolFormat
from relax_actors.data.tool_calls import parse_answer
from relax_actors.serving import event_stream
from relax_actors.serving.answers import Limits
from relax_actors.serving.live import visible
from relax_actors.serving.tokens import session_token
from relax_actors.sessions.dialogue import answer_message
from tests.support.running import wait_until
from tests.support.scripted_policy import SECRET, TOKEN, ScriptedPolicy, serve

USER: Any = {"role": "user", "content": "hi"}
HEAD = {"Authorization": f"Bearer {TOKEN}"}
SESSION = "group-3-1-0-0"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ScriptedPolicy]]:
    with serve(
        tmp_path_factory.mktemp("model"), lambda prompt: "x" * 3000 if "long" in prompt else "One %two."
    ) as found:
        yield found


@pytest.fixture
def gateway(served: tuple[str, ScriptedPolicy]) -> tuple[str, ScriptedPolicy]:
    served[1].resume.clear()
    served[1].cancelled.clear()
    return served


def chat(url: str) -> Iterator[str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as client:
        for chunk in client.chat.completions.create(model="tiny", messages=[USER], stream=True):
            yield chunk.choices[0].delta.content or ""


def text(url: str) -> Iterator[str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as client:
        for chunk in client.completions.create(model="tiny", prompt="hi", stream=True):
            yield chunk.choices[0].text


def responses(url: str) -> Iterator[str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as client:
        for event in client.responses.create(model="tiny", input="hi", stream=True):
            if event.type == "response.output_text.delta":
                yield event.delta
        assert event.type == "response.completed"
        assert event.response.output_text == "One %two."


def messages(url: str) -> Iterator[str]:
    with (
        anthropic.Anthropic(base_url=url, api_key=TOKEN, max_retries=0) as client,
        client.messages.stream(model="tiny", max_tokens=500, messages=[USER]) as stream,
    ):
        yield from stream.text_stream
        assert stream.get_final_message().stop_reason == "end_turn"


@pytest.mark.parametrize("client", [chat, text, responses, messages])
def test_first_text_arrives_before_the_last_is_generated(
    gateway: tuple[str, ScriptedPolicy], client: Callable[[str], Iterator[str]]
) -> None:
    url, policy = gateway
    parts, found = client(url), ""
    while found.strip() != "One":
        found += next(parts)
    policy.resume.set()
    assert found + "".join(parts) == "One %two."
    assert not policy.cancelled


@pytest.mark.parametrize("client", [chat, text, responses, messages])
def test_client_that_closes_its_stream_ends_the_generation(
    gateway: tuple[str, ScriptedPolicy], client: Callable[[str], Iterator[str]]
) -> None:
    url, policy = gateway
    parts = client(url)
    while "O" not in next(parts):
        pass
    parts.close()  # type: ignore[attr-defined]
    wait_until(lambda: policy.cancelled == [policy.calls[-1].call], "cancelled call")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 20}),
        ("/v1/responses", {"input": "hi"}),
        ("/inference/v1/generate", {"token_ids": [5, 6]}),
    ],
)
def test_client_that_leaves_before_a_whole_answer_ends_the_generation(
    gateway: tuple[str, ScriptedPolicy], path: str, body: dict[str, Any]
) -> None:
    url, policy = gateway
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}{path}", headers=HEAD, json=body, timeout=0.3)
    wait_until(lambda: policy.cancelled == [policy.calls[-1].call], "cancelled call")
    policy.resume.set()
    answer = httpx.post(f"{url}{path}", headers=HEAD, json=body, timeout=10)
    assert answer.status_code == 200


def test_tokens_and_log_probs_of_a_stream_are_those_of_the_whole(gateway: tuple[str, ScriptedPolicy]) -> None:
    url, policy = gateway
    policy.resume.set()
    ask = {"model": "tiny", "messages": [USER], "logprobs": True, "n": 2, "extra_body": {"return_token_ids": True}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as client:
        whole = client.chat.completions.create(**ask)
        tokens: dict[int, list[int]] = {0: [], 1: []}
        entries: dict[int, list[float]] = {0: [], 1: []}
        for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask):
            for choice in chunk.choices:
                tokens[choice.index] += (choice.model_extra or {}).get("token_ids", [])
                entries[choice.index] += [e.logprob for e in choice.logprobs.content or []] if choice.logprobs else []
    assert whole.choices[0].model_extra is not None
    assert tokens[0] == tokens[1] == whole.choices[0].model_extra["token_ids"]
    assert entries[1] == [-0.25] * len(tokens[1])
    assert chunk.usage is not None
    assert chunk.usage == whole.usage


def test_answer_that_is_begun_anew_and_differs_is_an_error_in_the_stream(gateway: tuple[str, ScriptedPolicy]) -> None:
    url, policy = gateway
    policy.changed = lambda token: token + 1 if token > 3 else token
    try:
        parts = chat(url)
        assert "One" in next(parts)
        policy.resume.set()
        with pytest.raises(openai.APIError) as failed:
            list(parts)
    finally:
        policy.changed = lambda token: token
    assert failed.value.body == {
        "message": "the answer was begun anew by another actor and differs from what was sent; send the request again",
        "type": "overloaded_error",
        "param": None,
        "code": "restarted",
    }


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_session_is_told_that_its_answer_arrived(gateway: tuple[str, ScriptedPolicy], mode: str) -> None:
    url, policy = gateway
    policy.resume.set()
    key = session_token(SECRET, SESSION)
    with openai.OpenAI(base_url=f"{url}/sessions/{SESSION}/v1", api_key=key, max_retries=0) as client:
        answer = client.chat.completions.create(model="tiny", messages=[USER], stream=mode == "stream")
        if mode == "stream":
            list(answer)
    wait_until(lambda: policy.delivered_calls[-1:] == [(SESSION, policy.calls[-1].call)], "note")


def test_client_that_reads_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "SEND_SECONDS", 0.2)
    limits = Limits(max_body_bytes=64 << 10, max_concurrent=1, request_seconds=30.0)
    ask = {"messages": [USER]}
    # Log-probs of 16 long answers are more than the buffers of a socket.
    data = json.dumps(ask | {"stream": True, "logprobs": True, "n": 16}).encode()
    with serve(tmp_path, lambda _: "x" * 3000, limits) as (url, _), socket.socket() as client:
        address = urlsplit(url)

        def status() -> int:
            answer = httpx.post(f"{url}/v1/chat/completions", headers=HEAD, json=ask, timeout=10)
            return answer.status_code

        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: status() == 429, "slow client")
        wait_until(lambda: status() == 200, "end of the slow client")


PARTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "[TOOL_CALLS]"]
PARTS += ["<|python_tag|>", "a", " b", "\n", "<", "{", "<function=f>", "</function>", "\ufffd"]


@given(st.lists(st.sampled_from(PARTS), max_size=9).map("".join), st.sampled_from([None, *ToolFormat]), st.data())
def test_what_is_shown_of_a_beginning_is_a_beginning_of_what_is_shown_of_the_whole(
    whole: str, tool_format: ToolFormat | None, data: st.DataObject
) -> None:
    thinks = data.draw(st.booleans())
    message = answer_message(parse_answer(whole, tool_format, thinks=thinks), "c" * 32)
    last = message.get("reasoning_content", ""), message["content"] or ""
    for length in range(len(whole), -1, -1):
        shown = visible(whole[:length], tool_format, thinks=thinks)
        assert last[0].startswith(shown[0])
        assert last[1].startswith(shown[1])
        last = shown


@pytest.mark.parametrize("streams", [False, True])
def test_request_that_waits_when_the_gateway_stops_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], *, streams: bool
) -> None:
    body = {"messages": [USER], "stream": streams}
    with ThreadPoolExecutor(1) as thread:
        with serve(tmp_path, lambda _: "%" if not streams else "One %two.") as (url, policy):
            asking = thread.submit(httpx.post, f"{url}/v1/chat/completions", headers=HEAD, json=body, timeout=30)
            wait_until(lambda: policy.calls, "the request")
        answer = asking.result(10)
    assert wait_until(lambda: policy.cancelled, "end of the generation") == [policy.calls[0].call]
    assert answer.status_code == (200 if streams else 503)
    last = answer.text.split("data: ")[-1] if streams else answer.text
    assert json.loads(last)["error"]["message"] == "the gateway stops; send the request again"
    assert "Traceback" not in "".join(capfd.readouterr())
