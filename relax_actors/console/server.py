"""The process of the console: serves the application until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import socket

from relax_actors.console.app import Console
from relax_actors.console.guard import Tokens
from relax_actors.console.runs import ConsoleRuns
from relax_actors.serving.server import HttpServer

CONNECTIONS = 64


def serve(console: Console, runs: ConsoleRuns, tokens: Tokens, listener: socket.socket, hosts: tuple[str, ...]) -> None:
    """Serve a console until SIGINT or SIGTERM, and close its runs."""
    asyncio.run(_serve(console, runs, tokens, listener, hosts))


async def _serve(
    console: Console, runs: ConsoleRuns, tokens: Tokens, listener: socket.socket, hosts: tuple[str, ...]
) -> None:
    halt, loop = asyncio.Event(), asyncio.get_running_loop()
    server = HttpServer(console.app(tokens, hosts), listener, None, CONNECTIONS)
    serving, beside = await server.start(), [loop.create_task(work) for work in (runs.watch(), runs.read_ahead())]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, halt.set)  # after uvicorn has set handlers of its own
    serving.add_done_callback(lambda _: halt.set())
    await halt.wait()
    for task in beside:
        task.cancel()
    await server.stop(lambda: None)
    await runs.close()
