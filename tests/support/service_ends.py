"""A rollout actor without an engine, and the policy as a gateway asks it, each with the rights of its user."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from broker.connection import Connection
from broker.leases import RunState
from broker.permissions import OPERATOR
from broker.store import Store
from broker.streams import open_bucket
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.messages import Prompt
from relax_actors.messages.generate import GenerateAnswer, GenerateCall, SessionAnswer, SessionCall
from relax_actors.runtime import Context
from relax_actors.serving.run_policy import RunPolicy
from relax_actors.sessions import service
from relax_actors.sessions.call_watch import CallWatch
from relax_actors.sessions.service import GenerationService
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.asked import Asked
from tests.support.contexts import context_of
from tests.support.embedded import Embedded
from tests.support.running import TINY

RUN = "asking"
GATEWAY = ("gateway.port=0",)
LEASE = {"pid": 1, "since": 0.0, "rows": [], "waits_for": None, "doing_since": 0.0}


class SilentSessions:
    """Sessions that never answer.

    Attributes:
        calls: the calls that have arrived.
    """

    def __init__(self) -> None:
        self.calls: list[GenerateCall] = []

    async def generate(self, call: GenerateCall, watch: CallWatch, author: str) -> GenerateAnswer:
        del watch, author
        self.calls.append(call)
        return await asyncio.get_running_loop().create_future()

    def on_arrival(self, call: str) -> None:
        """Ignore it."""

    def on_departure(self, call: str) -> None:
        """Ignore it."""

    async def handle(self, call: SessionCall) -> SessionAnswer:
        raise NotImplementedError


class ServiceEnds:
    """Both ends of the requests of a gateway.

    Attributes:
        broker: a real server with the accounts of a run.
        requests: requests that the rollout's present incarnation has.
        sessions: calls of sessions that it has.
        size: of the vocabulary.
        stop_ids: stop tokens of the tokenizer; those of the run have one more.
        connection: the gateway's.
        policy: asks the rollout.
    """

    def __init__(self, broker: Embedded, folder: Path, settings: tuple[str, ...] = GATEWAY, file: Path = TINY) -> None:
        self.broker = broker
        with closing(Connection(broker.address(OPERATOR), "root")) as root:
            root.call(ensure_run_streams(root, broker.config), 60)
            table = Table(root, Subjects(RUN), Store(folder / "store"), "test.0#1")
            self._contexts = {
                role: context_of(table, folder, role, settings, 1, file) for role in ("rollout", "gateway")
            }
        self._rollout: Connection | None = None
        self.start(1)
        gateway = self._as_user("gateway")
        self.connection, self.policy = gateway.table.connection, RunPolicy(gateway)

    def start(self, incarnation: int) -> None:
        """Start an incarnation of the rollout; an earlier one dies with what it has."""
        if self._rollout is not None:
            self._rollout.close()
        rollout = self._as_user("rollout")
        self._rollout = rollout.table.connection
        self.requests, self.sessions = Asked(), SilentSessions()
        self.service = self.make_service(rollout)
        self.service.start(self.sessions)
        lease = LEASE | {"incarnation": incarnation}
        self._rollout.call(rollout.state.renew_lease("rollout", 0, lease, 60), 20)

    def make_service(self, rollout: Context) -> GenerationService:
        """Return the service of an incarnation of the rollout."""
        tokenizer = Tokenizer(rollout.config.model_path)
        self.size, self.stop_ids = tokenizer.size, tokenizer.stop_ids
        stops = tokenizer.stop_ids | {0}, None
        return GenerationService(rollout, self.requests, tokenizer, 64, lambda _: stops, {})

    def _as_user(self, role: str) -> Context:
        context = self._contexts[role]
        connection = Connection(self.broker.address(role), role)
        bucket = connection.call(open_bucket(connection, context.table.subjects, 20), 30)
        table = Table(connection, context.table.subjects, context.table.store, context.author)
        return replace(context, table=table, state=RunState(connection, bucket))

    def begin(self, call: GenerateCall) -> Future[GenerateAnswer]:
        """Ask without waiting for the answer."""
        return asyncio.run_coroutine_threadsafe(self.policy.generate(call), self.connection.loop)

    def put_prompt(self, row: RowId) -> None:
        """Write the prompt of a row, so that it is one of the run."""
        with closing(Connection(self.broker.address(OPERATOR), "root")) as root:
            table = Table(root, Subjects(RUN), self._contexts["gateway"].table.store, "prompts.0#1")
            table.put(table.subject(row, "prompt"), Prompt("", np.array([1], np.int32), "", {}, 0, 0))

    def count_failure(self, row: RowId, *, external: bool) -> None:
        """Count a death of the rollout against a row, as its supervisor does."""
        with closing(Connection(self.broker.address(OPERATOR), "root")) as root:
            bucket = root.call(open_bucket(root, Subjects(RUN), 20), 30)
            counting = RunState(root, bucket).count_failure("rollout", row, "died", "", external_kill=external)
            root.call(counting, 20)

    def close(self) -> None:
        """Close the connections."""
        self.connection.close()
        if self._rollout is not None:
            self._rollout.close()


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceEnds]:
    """Return both ends, with a short interval between signs of life."""
    monkeypatch.setattr(service, "ALIVE_SECONDS", 0.1)
    broker = Embedded(tmp_path / "broker", load_config(TINY, [f"run.name={RUN}", *GATEWAY]))
    broker.start()
    found = ServiceEnds(broker, tmp_path)
    yield found
    found.close()
    broker.stop()
