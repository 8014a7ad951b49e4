"""Hostile HTTP: whatever arrives is answered with a clear error or a closed connection, and the gateway serves on."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from relax_actors.serving.answers import Limits
from relax_actors.serving.tokens import session_token
from tests.support.messages import assert_says
from tests.support.scripted_policy import SECRET, TOKEN, serve

LIMITS = Limits(max_body_bytes=64 << 10, max_concurrent=4, request_seconds=5.0)
HEAD = {"Authorization": f"Bearer {TOKEN}"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "hi"}
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(tmp_path_factory.mktemp("model"), lambda _: "Hello.", LIMITS) as (found, _):
        yield found


def is_alive(url: str) -> bool:
    answer = httpx.post(f"{url}{CHAT}", headers=HEAD, json={"messages": [USER]})
    return answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == "Hello."


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        (CHAT, b"{", 400, "the body is not JSON: "),
        (CHAT, b"\xff\xfe\x00", 400, "the body is not JSON: "),
        (CHAT, b"[]", 400, "the body is a list, not a JSON object"),
        (CHAT, b'{"messages": [], "temperature": NaN}', 400, "the body is not JSON: NaN is no number"),
        (
            CHAT,
            '{"a": "é数",\n "é": x}'.encode(),
            400,
            "the body is not JSON: Expecting value in line 2, column 7 (byte 23)",
        ),
        (
            CHAT,
            b'{"a":\n "\xc3\xa9\xff"}',
            400,
            "the body is not JSON: invalid start byte of utf-8 in line 2, column 4 ",
        ),
        (CHAT, json.dumps({"messages": DEEP}).encode(), 400, "the body is nested deeper than 48 levels"),
        (CHAT, b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, "the body is "),
        (CHAT, b" " * (65 << 10), 413, "the body has more than 65536 bytes; shorten"),
        (CHAT, b'{"messages": []}', 400, "messages is empty; send at least one message"),
        (CHAT, b'{"messages": "hi"}', 400, "messages: Input should be a valid list; correct the body"),
        (CHAT, b'{"messages": [{"role": 5, "content": "x"}]}', 400, "a message has role 5; write system, user"),
        (CHAT, b'{"messages": [{"role": "user", "content": {"a": 1}}]}', 400, "the content of a message is a dict"),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
            400,
            "a message has a part of type 'image_url'; the model of this run takes text alone",
        ),
        (
            CHAT,
            b'{"messages": [{"role":"user","content":"x"}], "n": 99}',
            400,
            "n: Input should be less than or equal to",
        ),
        (
            CHAT,
            b'{"messages": [{"role":"user","content":"x"}], "stop": [""]}',
            400,
            "stop must be at most 16 strings of",
        ),
        (
            CHAT,
            b'{"messages": [{"role":"user","content":"x"}], "top_p": 7}',
            400,
            "top_p: Input should be less than or",
        ),
        (CHAT, b'{"messages": [{"role":"user","content":"x"}], "tools": [{"type": "x"}]}', 400, "a tool is not "),
        (
            CHAT,
            b'{"messages": [{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{"}}]}]}',
            400,
            "the arguments of tool call 'f' are no JSON: ",
        ),
        (CHAT, b'{"tokens": [99999999]}', 400, "token 99999999 is not in the vocabulary of"),
        (MESSAGES, b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', 400, "a block of type 'image'"),
        (MESSAGES, b'{"max_tokens": 5}', 400, "messages: Field required; correct the body of the request"),
        (RESPONSES, b'{"input": [{"type": "file_search_call"}]}', 400, "input item of type 'file_search_call' is not"),
        (RESPONSES, b'{"input": "x", "previous_response_id": "r"}', 400, "previous_response_id is not supported: no"),
        ("/inference/v1/generate", b'{"token_ids": []}', 400, "token_ids: List should have at least 1 item"),
        ("/v1/completions", b'{"prompt": [[1], [2]]}', 400, "2 prompts in one request; send one request for each"),
        (
            MESSAGES,
            b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": []}}',
            400,
            "tool_choice '[]' is not supported; use none, auto, required",
        ),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}',
            400,
            "chat_template_kwargs may not set 'chat_template'; give variables of the chat template alone",
        ),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"asks": true}}',
            400,
            "chat_template_kwargs may not set 'asks'; give variables of the chat template alone",
        ),
        ("/v1/nothing", b"{}", 404, "POST /v1/nothing: no such route; the routes are listed in the"),
    ],
)
def test_bad_body_is_refused_with_its_reason(url: str, path: str, body: bytes, status: int, why: str) -> None:
    answer = httpx.post(f"{url}{path}", headers=HEAD, content=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"].startswith(why), answer.text
    assert is_alive(url)


ASKS = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}]},
    RESPONSES: {"input": "x"},
    "/v1/completions": {"prompt": "x"},
}
DISTORTIONS = {
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 1,
    "logit_bias": {"3": 5},
    "allowed_token_ids": [3],
    "min_tokens": 4,
    "ignore_eos": True,
    "bad_words": ["x"],
    "guided_json": {"type": "object"},
}


@pytest.mark.parametrize("name", DISTORTIONS)
def test_settings_that_change_the_distribution_are_refused_on_every_route(url: str, name: str) -> None:
    given = {name: DISTORTIONS[name]}
    why = "log-probs would no longer be those of the policy; leave it out"
    for path, body in ASKS.items():
        answer = httpx.post(f"{url}{path}", headers=HEAD, json=body | given)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, f"{name} is not supported: {why}")
    answer = httpx.post(f"{url}/inference/v1/generate", headers=HEAD, json={"token_ids": [1], "sampling_params": given})
    message = f"sampling_params.{name} is not supported: {why}"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_neutral_values_of_such_settings_are_accepted(url: str) -> None:
    neutral = {"top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "logit_bias": {}, "min_tokens": 0, "bad_words": None}
    for path, body in ASKS.items():
        assert httpx.post(f"{url}{path}", headers=HEAD, json=body | neutral).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (MESSAGES, {"messages": []}, "messages is empty; send at least one message"),
        (RESPONSES, {"input": []}, "input is empty; send at least one message"),
        ("/tokenize", {}, "prompt or messages is empty; send at least one message"),
        (CHAT, {"messages": []}, "messages is empty; send at least one message"),
        (
            CHAT,
            ASKS[CHAT] | {"functions": [{"name": "f"}]},
            "functions is not supported; send tools in its place",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}, "bad": 1}]}]}
            | {"chat_template_kwargs": {"fails": True}},
            "the chat template of the model refuses the messages: TemplateError: no such conversation; correct them",
        ),
    ],
)
def test_error_names_what_the_client_can_change(url: str, path: str, body: dict[str, Any], message: str) -> None:
    answer = httpx.post(f"{url}{path}", headers=HEAD, json=body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"tokens": [1]}, ["`messages`", "/v1/completions"]),
        ("/v1/completions", {"prompt": ""}, ["the prompt has no tokens"]),
        ("/v1/completions", {"prompt": [99999999]}, ["token 99999999", "vocabulary"]),
    ],
)
def test_prompt_that_a_session_cannot_take_is_refused(
    url: str, path: str, body: dict[str, Any], named: list[str]
) -> None:
    session = "group-3-1-0-0"
    head = {"Authorization": f"Bearer {session_token(SECRET, session)}"}
    answer = httpx.post(f"{url}/sessions/{session}{path}", headers=head, json=body)
    assert answer.status_code == 400
    assert_says(answer.json()["error"]["message"], *named)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000,
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /sessions/..%2f..%2f/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/models HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ],
)
def test_bytes_that_are_no_request_end_with_an_error_or_a_closed_connection(url: str, raw: bytes) -> None:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), 5) as connection:
        connection.settimeout(5)
        answer = b""
        with suppress(ConnectionError):
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(65536):
                answer += data
    assert not answer or answer.split(b" ", 2)[1] in (b"400", b"401", b"403", b"404", b"405"), answer
    assert is_alive(url)


def test_chunked_body_over_the_limit_is_cut_off(url: str) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 4096

    try:
        status = httpx.post(f"{url}{CHAT}", headers=HEAD, content=chunks()).status_code
    except httpx.WriteError:
        status = 413  # the server closed the connection before all of it was sent
    assert status == 413
    assert is_alive(url)


def test_every_route_but_health_needs_a_token(url: str) -> None:
    paths = [CHAT, MESSAGES, RESPONSES, "/v1/completions", "/tokenize", "/inference/v1/generate", "/sessions"]
    for path in paths:
        for head in (
            {},
            {"Authorization": "Bearer x"},
            {"Authorization": f"Basic {TOKEN}"},
            {"x-api-key": TOKEN + "x"},
        ):
            assert httpx.post(f"{url}{path}", headers=head, json={}).status_code == 401
    for path in ("/end", "/keep", "/v1/chat/completions"):
        assert httpx.post(f"{url}/sessions/group-0-0-0-0{path}", headers=HEAD, json={}).status_code == 403
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


@pytest.mark.parametrize("body", [{"reward": 1e39}, {"metrics": {"a": 1e39}}, {"metrics": {"a" * 129: 1.0}}])
def test_result_that_no_sample_can_hold_is_refused(url: str, body: dict[str, Any]) -> None:
    name = "group-0-0-0-0"
    head = {"Authorization": f"Bearer {session_token(SECRET, name)}"}
    answer = httpx.post(f"{url}/sessions/{name}/end", headers=head, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


def test_random_changes_of_a_request_never_break_the_gateway(url: str) -> None:
    order = random.Random(11)
    whole = json.dumps({"messages": [USER], "tools": [], "stop": ["x"], "seed": 3, "n": 1, "stream": False}).encode()
    with httpx.Client() as client:
        for _ in range(60):
            body = bytearray(whole)
            for _ in range(order.randint(1, 6)):
                body[order.randrange(len(body))] = order.randrange(256)
            answer = client.post(f"{url}{order.choice([CHAT, MESSAGES, RESPONSES])}", headers=HEAD, content=bytes(body))
            assert answer.status_code in (200, 400), answer.text
    assert is_alive(url)
