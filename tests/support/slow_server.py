"""An inference backend whose servers load for longer than `supervision.start_deadline`, and such a server.

The server computes, as a model that is loaded on a busy machine; the rollout waits for it without computing.
"""

from __future__ import annotations

import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from relax_actors.config import Config
from relax_actors.engines.protocols import InferenceEngine
from relax_actors.engines.protocols.server import ServerSpec
from relax_actors.engines.transformers.backend import TransformersBackend
from relax_actors.runtime import Context
from relax_actors.runtime.run_folder import RunFolder

LOAD_DEADLINES = 1.6
"""Start deadlines that a server takes to load."""
KEY = "SLOW_SERVER_KEY"


class SlowServed(TransformersBackend):
    """Generates with transformers, once a server is ready."""

    def build(self, context: Context) -> InferenceEngine:
        """Wait for the server."""
        while not context.folder.server(context.n).exists():
            time.sleep(0.1)
        return super().build(context)

    def server(self, config: Config) -> ServerSpec:
        """This module."""
        del config
        return ServerSpec(
            command=(sys.executable, "-m", "slow_server"), health="/health", generates="/ready", key_variable=KEY
        )


class Handler(BaseHTTPRequestHandler):
    """Answers every request that has the key."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200 if self.headers["Authorization"] == f"Bearer {os.environ[KEY]}" else 401)
        self.end_headers()


def main() -> None:
    """Load, then answer until killed."""
    seconds = RunFolder(Path(sys.argv[1])).load_config().supervision.start_deadline
    end = time.monotonic() + LOAD_DEADLINES * seconds
    while time.monotonic() < end:
        sum(range(10_000))
    HTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()


if __name__ == "__main__":
    main()
