"""An inference backend whose servers load for longer than `supervision.start_deadline`, and such a server.

The server computes, as a model that is loaded on a busy machine; the rollout waits for it without computing.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from relax_actors.config import Config
from relax_actors.engines.protocols import InferenceEngine
from relax_actors.engines.transformers.backend import TransformersBackend
from relax_actors.runtime import Context
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.outcome import StatusPipe

LOAD_DEADLINES = 1.6
"""Start deadlines that a server takes to load."""


class SlowServed(TransformersBackend):
    """Generates with transformers, once a server is ready."""

    def build(self, context: Context) -> InferenceEngine:
        """Wait for the server."""
        while not context.folder.server(context.n).exists():
            time.sleep(0.1)
        return super().build(context)

    def server_module(self, config: Config) -> str:
        """This module."""
        del config
        return "slow_server"


def main() -> None:
    """Load, then wait to be stopped."""
    folder, n = RunFolder(Path(sys.argv[1])), int(sys.argv[2])
    config, status = folder.load_config(), StatusPipe()
    box = BlackBox(folder.black_box(f"server.{n}"))
    folder.server(n).parent.mkdir(parents=True, exist_ok=True)
    folder.server(n).unlink(missing_ok=True)
    end = time.monotonic() + LOAD_DEADLINES * config.supervision.start_deadline
    while time.monotonic() < end:
        sum(range(10_000))
    folder.server(n).touch()
    status.ready()
    while signal.sigtimedwait([signal.SIGTERM], 0.2) is None:
        box.beat()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    main()
