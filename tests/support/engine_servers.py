"""A tiny HTTP server that answers what an SGLang server says of itself, as a test wants it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from relax_actors.config import Config
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.sglang.external import PROBE_TOKENS, TESTED

KEY = "right-key"


def answers_of(config: Config) -> dict[str, Any]:
    """Return the answers, by path, of a server that serves the model of a run."""
    tokenizer = Tokenizer(config.model_path)
    text = tokenizer.decode(range(PROBE_TOKENS))
    fields = json.loads((config.model_path / "config.json").read_text())
    return {
        "/model_info": {
            "model_type": fields["model_type"],
            "architectures": ["Qwen3ForCausalLM"],
            "is_generation": True,
        },
        "/server_info": {"version": TESTED, "max_req_input_len": 4096, "enable_fp32_lm_head": True},
        "/tokenize": {"tokens": tokenizer.encode_any(text, special=False).tolist()},
    }


@contextmanager
def server(said: dict[str, Any]) -> Iterator[str]:
    """Serve JSON answers by path to requests with the right key; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            allowed = self.headers.get("authorization") == f"Bearer {KEY}"
            status = 401 if not allowed else 200 if self.path in said else 404
            body = json.dumps(said.get(self.path, {})).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 of the base class

        def log_message(self, *_: Any) -> None: ...

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_port}"
    finally:
        found.shutdown()
        found.server_close()
        thread.join()
