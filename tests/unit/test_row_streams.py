"""Streams of samples from a server of a few lines: what counts as progress."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

import numpy as np
import pytest

from relax_actors.engines.protocols import GenerationRequest, StopStrings
from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.engines.sglang import row_streams, server
from relax_actors.engines.sglang.partial_sample import PartialSample
from relax_actors.engines.sglang.row_streams import RowStreams, SampleLimit, Served
from relax_actors.engines.sglang.server import Server
from tests.support.http_servers import serving

TOKENS = [5, 8, 9, 1, 2, 3, 4]


class StreamingServer(BaseHTTPRequestHandler):
    """Sends `TOKENS` one by one, whatever stop strings the client knows."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for i, token in enumerate(TOKENS):
            reason = {"type": "length"} if i == len(TOKENS) - 1 else None
            meta: dict[str, Any] = {"id": body["rid"][0], "completion_tokens": i + 1, "finish_reason": reason}
            meta["output_token_logprobs"] = [[-0.5, token, None]]
            self.wfile.write(f"data: {json.dumps({'output_ids': [token], 'meta_info': meta})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server_url() -> Iterator[str]:
    with serving(StreamingServer) as url:
        yield url


def test_tokens_after_a_stop_string_count_as_progress_of_the_server(server_url: str) -> None:
    strings = StopStrings(["89"], lambda token: str(token).encode())
    request = GenerationRequest(
        np.array([1, 2], np.int32),
        5,
        samples=1,
        temperature=1.0,
        top_p=1.0,
        max_tokens=len(TOKENS),
        stop_ids=frozenset(),
        stop_strings=strings,
    )
    sample = PartialSample(request, 0)

    async def generate() -> int:
        # As in a deterministic run, which aborts no sample: the server goes on after the stop string.
        streams = RowStreams(ServerRecord(server_url, "key", "ab"), SampleLimit(1), keep_partial=False)
        await streams.generate([sample], lambda: Served(3, {}))
        await streams.close()
        return streams.tokens

    assert asyncio.run(generate()) == len(TOKENS)
    assert sample.result().tokens.tolist() == [5, 8, 9]


class AdapterServer(BaseHTTPRequestHandler):
    """Sends two tokens with the first adapter, waits until the request is aborted, and then sends the rest."""

    requests: ClassVar[list[tuple[str, Any]]] = []
    aborted: ClassVar[threading.Event]
    unloads: ClassVar[threading.Event]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests.append((self.path, body))
        if self.path == "/unload_lora_adapter":
            assert type(self).unloads.wait(60)
        self.send_response(200)
        self.end_headers()
        if self.path == "/abort_request":
            type(self).aborted.set()
        if self.path != "/generate":
            return
        if body["lora_path"] == "old":
            self._send(body, TOKENS[:2], None, 2)
            assert type(self).aborted.wait(10)
            self._send(body, [], {"type": "abort", "message": "Aborted"}, 2)
        else:
            self._send(body, TOKENS[2:], {"type": "length"}, len(TOKENS) - 2)

    def _send(self, body: dict[str, Any], tokens: list[int], reason: dict[str, str] | None, count: int) -> None:
        scored = [[-0.5, token, None] for token in tokens]
        meta = {"id": body["rid"][0], "completion_tokens": count, "finish_reason": reason}
        spans = [{"version": "base", "start": 0, "end": count}]
        meta |= {"output_token_logprobs": scored, "weight_versions": spans}
        self.wfile.write(f"data: {json.dumps({'output_ids': tokens, 'meta_info': meta})}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(params=[True, False], ids=["at once", "slowly"])
def unloading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a server that unloads adapters at once, or not before the end of the test."""
    for module in (server, row_streams):
        monkeypatch.setattr(module, "UNLOAD_SECONDS", 20.0 if request.param else 0.5)
    AdapterServer.requests, AdapterServer.aborted, AdapterServer.unloads = [], threading.Event(), threading.Event()
    if request.param:
        AdapterServer.unloads.set()
    with serving(AdapterServer) as url:
        yield url
        AdapterServer.unloads.set()


def test_adapter_that_a_server_unloads_slowly_ends_neither_requests_nor_server(unloading: str) -> None:
    client = Server(ServerRecord(unloading, "key", "ab"))
    client.unload_adapter("old")
    client.close()
    assert AdapterServer.requests == [("/unload_lora_adapter", {"lora_name": "old"})]


def test_sample_continues_with_the_next_adapter_and_the_last_one_is_unloaded(unloading: str) -> None:
    request = GenerationRequest(
        np.array([1, 2], np.int32),
        5,
        samples=1,
        temperature=1.0,
        top_p=1.0,
        max_tokens=len(TOKENS),
        stop_ids=frozenset(),
    )
    sample = PartialSample(request, 0)

    def served() -> Served:
        # The next version comes when two tokens have.
        version, adapter = (4, "new") if len(sample) >= 2 else (3, "old")
        return Served(version, {"base": version}, adapter)

    async def generate(url: str) -> set[str]:
        streams = RowStreams(ServerRecord(url, "key", "ab"), SampleLimit(1), keep_partial=True)
        await streams.generate([sample], served)
        await streams.close()
        return streams.adapters

    assert asyncio.run(generate(unloading)) == set()
    assert sample.result().tokens.tolist() == TOKENS
    assert sample.result().versions.tolist() == [3, 3, 4, 4, 4, 4, 4]
    paths = [path for path, _ in AdapterServer.requests]
    assert paths == ["/generate", "/abort_request", "/unload_lora_adapter", "/generate"]
    assert AdapterServer.requests[2][1] == {"lora_name": "old"}
    assert AdapterServer.requests[3][1]["input_ids"] == [[1, 2, *TOKENS[:2]]]
