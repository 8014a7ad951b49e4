"""Sessions of agents in an incarnation of a rollout actor on a real server, with an engine that counts."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.connection import Connection
from broker.server import Server
from broker.subjects import RowId
from broker.table import Table
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import Generation
from relax_actors.messages import FinishReason
from relax_actors.messages.generate import GenerateAnswer, GenerateCall, SessionCall
from relax_actors.sessions.agent_sessions import AgentSessions
from relax_actors.sessions.call_watch import CallWatch
from relax_actors.sessions.dialogue import Dialogue
from relax_actors.sessions.service import GenerationService
from relax_actors.sessions.session_book import Session
from relax_actors.training.stops import stops_of
from tests.support.asked import Asked
from tests.support.asked import answer as give
from tests.support.contexts import context_of
from tests.support.running import SUPPORT

ROW = RowId(0, 0)
USER = {"role": "user", "content": "say 7"}


@pytest.fixture
def goes_on() -> threading.Event:
    """While it is not set, the engine answers nothing."""
    found = threading.Event()
    found.set()
    return found


class LeftRows(list[RowId]):
    """Rows whose samples have ended, or that another actor has taken.

    Attributes:
        error: raised for the next row.
    """

    error: Exception | None = None

    def add(self, row: RowId) -> None:
        """Append a row."""
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.append(row)


@pytest.fixture
def left() -> LeftRows:
    """Rows that have left the sessions."""
    return LeftRows()


@pytest.fixture
def make_sessions(table: Table, tmp_path: Path, goes_on: threading.Event, left: LeftRows) -> Callable[..., Any]:
    """Make the sessions of one incarnation of a rollout actor, whose engine answers "<number of its request>#".

    To a request with stop strings it answers the first of them without "#".
    """

    @contextmanager
    def make(incarnation: int, *more: str) -> Iterator[tuple[AgentSessions, Connection, list[np.ndarray]]]:
        settings = ("agent.function=x.y", "agent.max_turns=4", "agent.lease_seconds=1", *more)
        context = context_of(table, tmp_path, "rollout", settings, incarnation, SUPPORT / "tiny_agents.toml")
        context.table.patience = 0.2
        waits = threading.Event()
        tokenizer, requests, prompts = Tokenizer(context.config.model_path), Asked(waits.set), []
        stops, ended = partial(stops_of, tokenizer), threading.Event()
        service = GenerationService(context, requests, tokenizer, 256, stops, {7: "f" * 32})
        sessions = AgentSessions(context, Dialogue(tokenizer), service, 64, left.add)

        def engine() -> None:
            while not ended.is_set():
                waits.wait(1)
                waits.clear()
                for ticket in requests.take(8):
                    goes_on.wait(20)
                    prompts.append(ticket.request.tokens)
                    strings = ticket.request.stop_strings
                    tokens = tokenizer.encode(f"{len(prompts)}{'ab' if strings else '#'}", special=False)
                    zeros = np.zeros(len(tokens), np.float32)
                    versions = np.full(len(tokens), 7, np.int32)
                    give(ticket, Generation(tokens, zeros, versions, FinishReason.STOP))

        thread = threading.Thread(target=engine, daemon=True)
        thread.start()
        reopen(table.connection, sessions)
        yield sessions, table.connection, prompts
        ended.set()
        waits.set()
        thread.join(5)

    return make


def ask(
    connection: Connection, sessions: AgentSessions, session: str, messages: list[dict[str, str]], **fields: Any
) -> Any:
    call = GenerateCall(fields.pop("call", f"c{len(messages)}"), session=session, messages=messages, **fields)
    return connection.call(answer(sessions, call), 20)


def begin(
    connection: Connection, sessions: AgentSessions, call: GenerateCall, watches: list[CallWatch] | None = None
) -> Future[GenerateAnswer]:
    """Ask without waiting for the answer."""
    return asyncio.run_coroutine_threadsafe(answer(sessions, call, watches), connection.loop)


async def answer(sessions: AgentSessions, call: GenerateCall, watch: list[CallWatch] | None = None) -> Any:
    """Ask, as the service of a gateway's requests does."""
    own = CallWatch()
    if watch is not None:
        watch.append(own)
    return await sessions.generate(call, own, "gateway.0#1")


def handle(connection: Connection, sessions: AgentSessions, kind: str, session: str = "", **fields: Any) -> Any:
    return connection.call(sessions.handle(SessionCall(kind, session, **fields)), 20)


def reopen(connection: Connection, sessions: AgentSessions, row: RowId = ROW) -> None:
    """Offer the two samples of a row, as for a row that was delivered, or delivered again."""
    begin_reopening(connection, sessions, row).result(20)


def begin_reopening(connection: Connection, sessions: AgentSessions, row: RowId = ROW) -> Future[None]:
    """Offer the two samples of a row without waiting for it."""
    offered = [Session(row, n, {"prompt": "say 7"}, 5) for n in range(2)]
    return asyncio.run_coroutine_threadsafe(sessions.open(row, offered), connection.loop)


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Stop the broker for a while: what is written or looked up meanwhile waits."""
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, server.process.pid, os.WSTOPPED)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@contextmanager
def full(table: Table) -> Iterator[None]:
    """Leave no room in the table for a while."""
    js, stream = table.connection.js, table.subjects.table_stream

    def limit(size: int | None) -> None:
        config = table.connection.call(js.stream_info(stream), 20).config
        config.max_bytes = size
        table.connection.call(js.update_stream(config), 20)

    before = table.connection.call(js.stream_info(stream), 20)
    limit(before.state.bytes + 1)
    try:
        yield
    finally:
        limit(before.config.max_bytes)
