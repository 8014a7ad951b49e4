"""Streams of samples from a server of a few lines: what counts as progress."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import pytest

from relax_actors.engines.protocols import GenerationRequest, StopStrings
from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.engines.sglang.partial_sample import PartialSample
from relax_actors.engines.sglang.row_streams import RowStreams, SampleLimit, Served
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
