"""A rollout actor with a real engine and rows, and the policy as a gateway asks it, in one process on a real server."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from broker.subjects import RowId
from broker.table import Table
from relax_actors.messages import Prompt, Trajectory
from relax_actors.messages.generate import GenerateAnswer, GenerateCall, SessionAnswer, SessionCall
from relax_actors.roles.rollout import Rollout
from relax_actors.runtime import Context, Row
from relax_actors.serving.run_policy import RunPolicy
from tests.support.contexts import context_of
from tests.support.running import SUPPORT, wait_until
from tests.support.weight_ends import TrainerEnd

USER = {"role": "user", "content": "say 7"}
LONG = 8000
"""Tokens of an answer that is not complete before a test has ended."""
SETTINGS = (
    f"model.architecture.max_position_embeddings={2 * LONG}",
    f"trainer.max_tokens_per_microbatch={2 * LONG}",
    f"rollout.max_tokens={LONG}",
    f"rollout.min_tokens={LONG}",
    "rollout.group_size=1",
    "staleness.max=4",
)
LEASE = {"pid": 1, "incarnation": 1, "since": 0.0, "rows": [], "waits_for": None, "doing_since": 0.0}


class PolicyEnds:
    """A rollout actor whose rows a test hands to it, and clients of a gateway.

    Attributes:
        trainer: publishes weights.
        role: the rollout.
        arriving: rows that the rollout takes in while others are generated.
        results: results of rows that have left.
    """

    def __init__(self, table: Table, folder: Path, make_role: Callable[[], Rollout], *settings: str) -> None:
        self._table, self._folder, self._settings = table, folder, settings
        self.trainer = TrainerEnd(self.context("trainer"))
        self.role = make_role()
        self.role.context = self.context("rollout")
        self.role.setup()
        table.connection.call(self.role.context.state.renew_lease("rollout", 0, LEASE, 600), 20)
        self._policy = RunPolicy(self.context("gateway"))
        self.arriving: deque[Row] = deque()
        self.results: dict[RowId, Any] = {}
        self._thread: threading.Thread | None = None

    def context(self, role: str) -> Context:
        """Return the context of an actor."""
        settings = (*SETTINGS, *self._settings)
        return context_of(self._table, self._folder, role, settings, 1, SUPPORT / "tiny_agents.toml")

    def row(self, index: int, seed: int = 0) -> Row:
        """Return a new row."""
        prompt = Prompt("", np.array([1, 2, 10], np.int32), "", {}, seed, 0, messages=[USER])
        row = RowId(0, index)
        subject = self._table.subject(row, "prompt")
        self._table.put(subject, prompt)
        cell = self._table.get(subject)
        assert cell is not None
        return Row(row, {"prompt": cell.data}, self._table.store)

    def start(self, *rows: Row) -> None:
        """Hand rows to the rollout, in a thread of its own."""

        def more(limit: int) -> Sequence[Row]:
            return [self.arriving.popleft()] if self.arriving and limit > 0 else []

        def run() -> None:
            for results in self.role.stream(rows, more):
                self.results |= {row.id: result for row, result in results}

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def serve(self, until: Callable[[], bool]) -> None:
        """Let the rollout answer requests while it has no row."""

        def run() -> None:
            while not until():
                self.role.serve(until)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def begin(self, call: GenerateCall, pieces: list[Any] | None = None) -> Future[GenerateAnswer]:
        """Ask without waiting for the answer, whose pieces are appended."""
        asking = self._policy.generate(call, None if pieces is None else pieces.append)
        return asyncio.run_coroutine_threadsafe(asking, self._table.connection.loop)

    def ask(self, session: str, call: str, **fields: Any) -> GenerateAnswer:
        """Ask in a session, and return the answer."""
        answer = self.begin(GenerateCall(call, session=session, messages=[USER], **fields)).result(60)
        assert not answer.refusal, answer.detail
        return answer

    def session(self, kind: str, name: str = "", **fields: Any) -> SessionAnswer:
        """Take, keep, show or end a session."""
        return self._table.connection.call(self._policy.session(SessionCall(kind, name, lease=60.0, **fields)), 30)

    def take(self) -> str:
        """Take a sample as soon as one is offered; return its session."""
        return str(wait_until(lambda: self.session("take").session, "sample"))

    def result(self, index: int) -> Trajectory:
        """Wait for the result of a row."""
        found = wait_until(lambda: self.results.get(RowId(0, index)), f"result of row {index}")
        assert isinstance(found, Trajectory), found
        return found

    def join(self) -> None:
        """Wait for the end of what the rollout works on."""
        if self._thread is not None:
            self._thread.join(60)
            assert not self._thread.is_alive()

    def close(self) -> None:
        self.join()
        self.role.close()
