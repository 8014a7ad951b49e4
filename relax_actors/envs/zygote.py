"""Zygote of sessions: a process with the environment's class imported, which forks.

Started by an actor as `python -m relax_actors.envs.zygote <socket> <file with the settings>`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import socket
import sys
from functools import partial

from relax_actors.config.environment import EnvironmentSection
from relax_actors.envs.loading import load_environment
from relax_actors.envs.session import Template, serve
from relax_actors.errors import ConfigError
from relax_actors.isolation.fork_server import ForkServer, send

MAX_PROBLEM = 8000


def run_session(template: Template, cpu_seconds: int | None, descriptor: int) -> None:
    """Run a session in a fork."""
    if cpu_seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    asyncio.run(serve(template, socket.socket(fileno=descriptor)))


def main() -> None:
    """Import the class, then fork sessions until the actor ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the actor decides
    connection = socket.socket(fileno=int(sys.argv[1]))
    with os.fdopen(int(sys.argv[2])) as file:
        body, sys.path[:] = json.load(file)
    section = EnvironmentSection.model_validate(body)
    try:
        cls, values = load_environment(section)
        reusable = cls.shares_process and section.cpu_seconds is None
        template = Template(cls, values, section.max_observation_bytes, section.players, reusable)
        cls.clean_up(values)
    except ConfigError as error:
        send(connection, {"problem": str(error)[:MAX_PROBLEM]})
        return
    send(connection, {"ready": True})
    gc.collect()
    gc.freeze()
    ForkServer(connection, partial(run_session, template)).serve()
    cls.clean_up(values)


if __name__ == "__main__":
    main()
