"""Generation by an SGLang server that outlives whoever uses it.

Invariant: what is served are weights whose bytes had the published fingerprint, under a name that has it in it; the
server says of every token under which name it was generated. A server that is gone is waited for, given the weights in
use again, and asked for what the samples still lack.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import structlog
from torch import Tensor

from relax_actors.data.model_folder import MoeFacts
from relax_actors.engines.protocols.inference import Done, GeneratesAll, GenerationRequest, More, Refresh, nothing_more
from relax_actors.engines.sglang.concurrency import Concurrency
from relax_actors.engines.sglang.loading import Loader, Staged
from relax_actors.engines.sglang.names import on_disk
from relax_actors.engines.sglang.record import ServerRecord
from relax_actors.engines.sglang.rows import Rows
from relax_actors.engines.sglang.server import Server, ServerGoneError
from relax_actors.engines.sglang.streams import Streams, cancelled, first_of
from relax_actors.errors import ActorError, EngineError, StoreError
from relax_actors.weights import files as weights
from relax_actors.weights.host_copy import HostCopy
from relax_actors.weights.protocol import Step

LOOK_SECONDS, TICK_SECONDS = 0.1, 0.01
NAMES = 64
"""Versions whose names are remembered; no sample is that old."""
MAX_LOSSES = 5
"""Times that the server may be lost with no token in between, before the rows are taken for the cause."""
log = structlog.get_logger()


class SglangEngine(GeneratesAll):
    """Uses one server at a time; see `InferenceEngine`.

    Args:
        find: gives the server, or None while there is none.
        loader: how it gets weights.
        context_length: of the model.
        rows: generated at once, at most.
        patience: seconds that a server is waited for.
        stall: seconds without a token after which a server of our own is killed.
        moe: of the model, if the experts that it chooses are to be told.
        keeps_partial: whether a sample goes on from what it has when its server was lost; else it begins anew, so that
            its numbers do not depend on that.
        progress: told that work goes on while the server is waited for.
        stopping: whether to give up waiting.
    """

    def __init__(
        self,
        find: Callable[[], ServerRecord | None],
        loader: Loader,
        context_length: int,
        *,
        rows: int,
        patience: float,
        stall: float,
        moe: MoeFacts | None = None,
        keeps_partial: bool = True,
        progress: Callable[[], None] = lambda: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._find, self._loader, self._context_length, self._moe = find, loader, context_length, moe
        self._patience, self._stall, self._keeps_partial = patience, stall, keeps_partial
        self._progress, self._stopping = progress, stopping
        self._concurrency = Concurrency(rows)
        self._loop = asyncio.new_event_loop()
        # Guards what is staged and what is served: weights are prepared in another thread.
        self._changing = threading.Lock()
        self._server: Server | None = None
        self._streams: Streams | None = None
        self._lost: set[str] = set()
        self._why = ""
        # Why the server did not take weights while it generated; nobody knows then what it serves.
        self._unsure: ServerGoneError | None = None
        self._staged: Staged | None = None
        self._serving: Staged | None = None
        self._named: dict[str, int] = {}
        self._rows = Rows()
        self.losses = 0
        """Servers that were lost."""

    @property
    def context_length(self) -> int:
        """Tokens that prompt and completion may have together."""
        return self._context_length

    @property
    def version(self) -> int | None:
        """Version of the weights that are served."""
        return None if self._serving is None else self._serving.version

    @property
    def rows(self) -> Rows:
        """Rows in progress."""
        return self._rows

    def empty_copy(self) -> HostCopy:
        """A copy of tensors; see `TakesWeights`."""
        return HostCopy()

    def stage(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Make weights ready for the server; see `TakesWeights`."""
        named = on_disk(tensors)
        staged = Staged(version, weights.fingerprint(named.items()))
        if staged != self._serving:
            self._loader.stage(staged, named)
        with self._changing:
            before, self._staged = self._staged, staged
            needed = (staged, self._serving)
        if before is not None and before not in needed:
            self._loader.forget(before)

    def swap(self) -> int:
        """Have the server take what was staged, also while it generates; see `TakesWeights`."""
        with self._changing:
            staged, self._staged = self._staged, None
            if staged is None:
                msg = "no weights are staged; nothing can be swapped"
                raise StoreError(msg)
            before, self._serving = self._serving, staged
        self._named = dict([*self._named.items(), (staged.identity, staged.version)][-NAMES:])
        try:
            if self._rows.open:
                self._swap_in_flight()
            else:
                self._attach()
        except (StoreError, EngineError) as error:
            self._serving = None
            msg = f"weights {staged.version} cannot be served: {error}"
            raise ActorError(msg) from error
        if before is not None and before != staged:
            self._loader.forget(before)
        return staged.version

    def _swap_in_flight(self) -> None:
        for sample in self._rows.samples:
            sample.swapped()
        try:
            if (server := self._server) is not None:
                server.pause()
                self._give(server)
                server.resume()
        except ServerGoneError as error:
            # It may only have been too slow. Whoever waits for the samples sees to it.
            self._unsure = error

    def load(self, version: int, fingerprint: str, shards: Sequence[Path]) -> None:
        """Swap to a whole set of weights at once; see `TakesWeights`."""
        copy = HostCopy()
        try:
            copy.take([Step(version, fingerprint, shards)])
        except StoreError:
            self._serving = None
            raise
        self.stage(version, copy.tensors)
        self.swap()

    def _give(self, server: Server) -> None:
        """Have a server serve the weights in use."""
        assert self._serving is not None  # noqa: S101 nothing is served before the first swap
        if server.identity() == self._serving.identity:
            return
        # Large weights take longer to load than an actor may be silent.
        with ThreadPoolExecutor(1, thread_name_prefix="loading") as thread:
            loading = thread.submit(self._loader.load, server, self._serving)
            while not wait([loading], LOOK_SECONDS).done:
                self._progress()
        loading.result()

    def wait_for_server(self) -> None:
        """Wait until there is one: an actor without has nothing to do with rows.

        Raises:
            ActorError: there is none.
        """
        self._until_it_answers(lambda _: None)

    def _attach(self) -> None:
        """Have a server serve the weights in use, and generate nothing."""
        self._until_it_answers(self._set_up)

    def _until_it_answers(self, ask: Callable[[Server], None]) -> None:
        """Ask the server in use something, or the next one if it is gone.

        Raises:
            ActorError: none answers.
        """
        end = time.monotonic() + self._patience
        while True:
            try:
                ask(self._server or self._next_server(end))
            except ServerGoneError as error:
                self._lose(str(error))
            else:
                return

    def _next_server(self, end: float) -> Server:
        """The next server, waited for; without the requests of a life before this one."""
        while True:
            if time.monotonic() > end or self._stopping():
                last = f"; of the last: {self._why}" if self._why else ""
                msg = f"no inference server is ready within {self._patience:g} s; logs/server.*.log says why{last}"
                raise ActorError(msg)
            record = self._find()
            if record is not None and record.life not in self._lost:
                self._server = server = Server(record)
                server.abort()
                server.resume()
                self._streams = Streams(record, self._concurrency, keeps_partial=self._keeps_partial)
                return server
            time.sleep(LOOK_SECONDS)
            self._progress()

    def _set_up(self, server: Server) -> None:
        self._await_idle(server)
        server.end_update()
        self._give(server)

    def _await_idle(self, server: Server) -> None:
        end = time.monotonic() + self._stall
        while not server.is_idle():
            if time.monotonic() > end:
                msg = f"the server at {server.record.url} does not end its requests within {self._stall:g} s"
                raise ServerGoneError(msg)
            time.sleep(TICK_SECONDS)
            self._progress()

    def _lose(self, why: str) -> None:
        """Have done with the server; one of our own that hangs is killed, to be started again."""
        server, self._server, self._unsure = self._server, None, None
        if server is None:
            return
        log.warning("server_lost", url=server.record.url, reason=why)
        self.losses, self._why = self.losses + 1, why
        if server.record.is_own:
            self._lost.add(server.record.life)
            server.record.kill()
        self._let_go(server)
        time.sleep(LOOK_SECONDS)

    def _let_go(self, server: Server) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            self._loop.run_until_complete(streams.close())
        server.close()

    def stream(
        self,
        requests: Sequence[GenerationRequest],
        progress: Callable[[], None],
        refresh: Refresh | None = None,
        more: More = nothing_more,
    ) -> Iterator[Done]:
        """Generate all samples of all requests, and of those that come while the server has room; see the protocol.

        Raises:
            StoreError: no weights are served.
            ActorError: there is no server.
            EngineError: the server refuses, or is lost again and again.
        """
        if self._serving is None:
            msg = "no verified weights are loaded; nothing can be generated"
            raise StoreError(msg)
        rows = self._rows = Rows(self._moe)
        rows.add(requests)
        losses = 0
        try:
            while rows.open:
                before = rows.tokens
                if self._server is None:
                    self._attach()
                try:
                    yield from self._finish(rows, progress, refresh, more)
                except ServerGoneError as error:
                    self._lose(str(error))
                    # Rows that join would hide by their tokens that one of these is the cause.
                    more = nothing_more
                    losses = losses + 1 if rows.tokens <= before else 1
                    if losses > MAX_LOSSES:
                        msg = f"the inference server was lost {losses} times in a row with these rows: {error}"
                        raise EngineError(msg) from error
        finally:
            self._rows = Rows()

    def _finish(self, rows: Rows, progress: Callable[[], None], refresh: Refresh | None, more: More) -> Iterator[Done]:
        """Have the server finish what is not finished.

        Raises:
            ServerGoneError: it is gone, or hangs.
        """
        streams, run = self._streams, self._loop.run_until_complete
        assert streams is not None  # noqa: S101 there is a server
        tasks: dict[asyncio.Task[None], int] = {}
        told, moved = -1, time.monotonic()
        try:
            while rows.open:
                for i in rows.open.keys() - set(tasks.values()):
                    tasks[self._loop.create_task(streams.finish(rows.open[i], self._dated))] = i
                done = run(first_of(tasks, TICK_SECONDS))
                if streams.tokens != told:
                    told, moved = streams.tokens, time.monotonic()
                    progress()
                if ended := [task for task in done if task.exception() is None]:
                    yield [rows.give(tasks.pop(task)) for task in ended]
                for task in done:
                    task.result()
                came = more(self._concurrency.limit - len(rows.open)) if rows.open else ()
                rows.add(came)
                if ended or came:
                    # Who takes and gives rows may have had to wait: the server is not to blame.
                    moved = time.monotonic()
                if rows.open and refresh is not None and refresh():
                    moved = time.monotonic()
                self._require_life(streams, moved)
        finally:
            run(cancelled(tasks))

    def _require_life(self, streams: Streams, moved: float) -> None:
        if self._unsure is not None:
            raise self._unsure
        if time.monotonic() - moved > self._stall:
            msg = f"the server at {streams.record.url} gives no token for {self._stall:g} s"
            raise ServerGoneError(msg)

    def _dated(self) -> tuple[int, Mapping[str, int]]:
        """The version in use, and all versions by name."""
        assert self._serving is not None  # noqa: S101 checked before anything is asked for
        return self._serving.version, self._named

    def metrics(self) -> dict[str, float]:
        """Rows that the server may have at once, and servers lost."""
        return {"rows_at_once": self._concurrency.limit, "servers_lost": self.losses}

    def close(self) -> None:
        """Let the server be; it is for the next life, or the node ends it."""
        if self._server is not None:
            with suppress(EngineError):
                self._server.abort()
            self._let_go(self._server)
        self._loader.close()
        self._loop.close()
