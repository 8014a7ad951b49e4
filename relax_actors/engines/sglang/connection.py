"""Connection of an engine to its server, which is replaced when it is lost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog
from torch import Tensor

from relax_actors.data.model_folder import MoeFacts
from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.engines.sglang.media_reference import MediaReferences
from relax_actors.engines.sglang.merged_adapter import MergedAdapter
from relax_actors.engines.sglang.row_streams import RowStreams, SampleLimit
from relax_actors.engines.sglang.server import Server, ServerGoneError, ServerRoom
from relax_actors.engines.sglang.weight_loaders import to_checkpoint_names
from relax_actors.errors import ActorError, EngineError

POLL_SECONDS, IDLE_POLL_SECONDS = 0.1, 0.01
log = structlog.get_logger()


def _no_progress() -> None:
    """Report nothing."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """Settings of an engine.

    Args:
        context_length: of the model, in tokens.
        rows: largest number of rows generated at once.
        group: samples of a row.
        patience: seconds to wait for a server.
        stall: seconds without a token after which a server counts as hung.
        moe: of the model, if its chosen experts are recorded.
        media: makes the references to media of prompts; None for a model that reads text only.
        prefixes: see `SglangSpec`.
        parts: see `presence.RENAMED`.
        merged: makes full sets of weights from versions of an adapter; None if versions are full sets.
        quantization: how the server quantises weights.
        grammars: whether the server applies grammars.
        keep_partial: whether samples continue after their server was lost, and are aborted at a stop string. If not,
            they start again, and run to their end, so that their tokens and log-probs do not depend on time.
        progress: called while the engine waits for a server.
        stopping: returns whether to give up waiting.
    """

    context_length: int
    rows: int
    patience: float
    stall: float
    group: int = 1
    moe: MoeFacts | None = None
    media: MediaReferences | None = None
    prefixes: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    merged: MergedAdapter | None = None
    quantization: str = "none"
    grammars: bool = False
    keep_partial: bool = True
    progress: Callable[[], None] = _no_progress
    stopping: Callable[[], bool] = _never

    def named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights by the names that the server expects; see `to_checkpoint_names`."""
        return to_checkpoint_names(tensors, self.prefixes, self.parts)


class ServerConnection:
    """The server in use, if there is one; `find` returns the record of the current one."""

    def __init__(self, find: Callable[[], ServerRecord | None], settings: SglangSettings) -> None:
        self._find, self._settings = find, settings
        self._lost_instances: set[str] = set()
        self._last_loss = ""
        self.loop = asyncio.new_event_loop()
        self.limit = SampleLimit(settings.rows * settings.group, settings.group)
        self.counts: Counter[str] = Counter()
        self.room: ServerRoom | None = None
        """That of the last server; None before the first."""
        self.server: Server | None = None
        self.streams: RowStreams | None = None
        self.failure: ServerGoneError | None = None
        """Why the server did not complete a weight update during generation; its weights are unknown then."""
        self.losses = 0
        """Number of servers that were lost."""
        self._is_away = False

    def call(self, request: Callable[[Server], None]) -> None:
        """Make a request to the server in use, or to the next one; raises ActorError if none answers in time."""
        end = time.monotonic() + self._settings.patience
        while True:
            try:
                request(self.server or self._wait_for_server(end))
            except ServerGoneError as error:
                self.discard(str(error))
            else:
                return

    def _wait_for_server(self, end: float) -> Server:
        """Wait for the next server; abort requests left by an earlier incarnation of the actor."""
        settings = self._settings
        while True:
            if time.monotonic() > end or settings.stopping():
                last = f"; the last one: {self._last_loss}" if self._last_loss else ""
                msg = f"no inference server is ready within {settings.patience:g} s; see logs/server.*.log{last}"
                raise ActorError(msg)
            record = self._find()
            if record is not None and record.instance not in self._lost_instances:
                self.server = server = Server(record)
                server.abort()
                server.resume()
                server.resume_memory()  # left away by an earlier incarnation; this actor has the device now
                self._is_away, self.room = False, server.room()
                self.streams = RowStreams(record, self.limit, keep_partial=settings.keep_partial, counts=self.counts)
                return server
            time.sleep(POLL_SECONDS)
            settings.progress()

    def release_memory(self) -> int:
        """Have the idle server leave its GPU; return the bytes that it frees there."""
        server, room = self.server, self.room
        if server is None or room is None or self._is_away or not room.leaving_bytes:
            return 0  # a server on a CPU keeps its memory, and the prefixes in its cache
        try:
            self.wait_until_idle(server)
            server.release_memory()
        except ServerGoneError as error:
            self.discard(str(error))
            return 0
        self._is_away = True
        return room.leaving_bytes

    def resume_memory(self) -> int:
        """Have the server return to its GPU; return the bytes that it takes there."""
        server, room = self.server, self.room
        if server is None or room is None or not self._is_away:
            return 0
        self._is_away = False
        try:
            server.resume_memory()
        except ServerGoneError as error:
            self.discard(str(error))
            return 0
        return room.leaving_bytes

    def wait_until_idle(self, server: Server) -> None:
        """Wait until a server has no requests, which flushes its cache; raises ServerGoneError if they do not end."""
        end = time.monotonic() + self._settings.stall
        while not server.is_idle():
            if time.monotonic() > end:
                msg = f"the server at {server.record.url} does not end its requests within {self._settings.stall:g} s"
                raise ServerGoneError(msg)
            time.sleep(IDLE_POLL_SECONDS)
            self._settings.progress()

    def check_alive(self, last_progress: float) -> None:
        """Check that the server generates; `last_progress` is a time of `time.monotonic`.

        Raises:
            ServerGoneError: a weight update failed, or no token came for the stall time.
        """
        if self.failure is not None:
            raise self.failure
        if time.monotonic() - last_progress > self._settings.stall:
            url = self.server.record.url if self.server is not None else "an unknown address"
            msg = f"the server at {url} generates no token for {self._settings.stall:g} s"
            raise ServerGoneError(msg)

    def discard(self, reason: str) -> None:
        """Disconnect from a lost server.

        A server that the run started is killed, so that the node starts another.
        """
        server, self.server, self.failure = self.server, None, None
        if server is None:
            return
        log.warning("server_lost", url=server.record.url, reason=reason)
        self.losses, self._last_loss = self.losses + 1, reason
        if server.record.is_own:
            self._lost_instances.add(server.record.instance)
            server.record.kill()
        self._disconnect(server)
        time.sleep(POLL_SECONDS)

    def _disconnect(self, server: Server) -> None:
        streams, self.streams = self.streams, None
        if streams is not None:
            self.loop.run_until_complete(streams.close())
        server.close()

    def close(self) -> None:
        """Abort this actor's requests and disconnect; the server stays for the next incarnation."""
        if self.server is not None:
            with suppress(EngineError):
                self.server.abort()
            self._disconnect(self.server)
        self.loop.close()
