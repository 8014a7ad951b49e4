"""Zygote of the actors: a process that has imported torch and transformers, and forks actors that need them.

A killed actor is back in a fraction of the time, and several actors cost one import.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import setproctitle

from broker.lean_imports import skip_optional_imports
from relax_actors.isolation.fork_server import ForkServer, send
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.supervision.outcome import STATUS_FD

ACTOR_MODULE = "relax_actors.supervision.actor_process"
PRELOADED = (
    "relax_actors.supervision.actor_process",
    "relax_actors.engines.lean_imports",
    "relax_actors.engines.transformers.engine",
    "relax_actors.engines.torch.engine",
    "relax_actors.engines.torch.scorer",
    "relax_actors.supervision.preloaded_roles",
)
PRELOADED_SIMULATED = ("relax_actors.supervision.actor_process", "relax_actors.supervision.preloaded_roles")
"""Modules for simulated engines, without torch."""


def run_actor(actor: dict[str, Any], log: int, status: int) -> None:
    """Run an actor in a fork, as in a process of its own: what it imports now is read from disk.

    Args:
        actor: `arguments` of `actor_process.main`, and variables of the `environment` that only this actor has.
        log: descriptor for its output.
        status: descriptor of its status pipe.
    """
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    arguments = actor["arguments"]
    sys.argv[1:] = arguments
    importlib.invalidate_caches()  # folders and packages may have come since the zygote looked
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # all forks would draw the same numbers; Python's own module seeds itself
    # Show the command line of a started actor, for `ps` and for searches by command line.
    setproctitle.setproctitle(" ".join([sys.executable, "-m", ACTOR_MODULE, *arguments]))
    from relax_actors.supervision import actor_process  # noqa: PLC0415 preloaded by the zygote

    os.environ.update({**actor["environment"], STATUS_FD: str(status)})
    actor_process.main(arguments)


def main() -> None:
    """Run the zygote; the process's entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    began = time.monotonic()
    box = BlackBox(Path(sys.argv[2]))
    modules = sys.argv[3:]
    skip_optional_imports()
    gc.disable()  # modules make objects that stay: looking for garbage among them takes a fifth of their import
    for name in modules:
        __import__(name)
    # Forks leave the modules' objects out of garbage collection: to look at all of them takes 0.3 s of a training step.
    gc.freeze()
    gc.enable()
    sys.stderr.write(f"preloaded {', '.join(modules)} in {time.monotonic() - began:.1f} s\n")
    sys.stderr.flush()
    send(connection, {"ready": True})
    ForkServer(connection, run_actor, box.beat).serve()


if __name__ == "__main__":
    main()
