"""Inference engine that generates with an SGLang server, which outlives the actor.

Invariant: the served weights have the published fingerprint and carry it in their name on the server, which reports the
name for every token. If the server is lost, the engine waits for the next one, loads the weights in use again, and
requests the missing tokens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain
from pathlib import Path

from torch import Tensor

from relax_actors.engines.protocols.inference import (
    Done,
    GenerateMixin,
    GenerationRequest,
    MoreRequests,
    Refresh,
    no_more_requests,
)
from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.engines.sglang.connection import ServerConnection, SglangSettings
from relax_actors.engines.sglang.partial_sample import ActiveRows
from relax_actors.engines.sglang.row_streams import Served, cancel_all, wait_for_first
from relax_actors.engines.sglang.server import Server, ServerGoneError
from relax_actors.engines.sglang.weight_loaders import StagedWeights, WeightLoader
from relax_actors.errors import ActorError, ConfigError, EngineError, StoreError
from relax_actors.weights import files as weights
from relax_actors.weights.host_copy import HostCopy
from relax_actors.weights.node_sets import NodeSet
from relax_actors.weights.protocols import WeightUpdate

POLL_SECONDS, TICK_SECONDS = 0.1, 0.01
MAX_NAMES = 64
"""Number of versions whose names are kept; no sample contains tokens of an older one."""
MAX_LOSSES = 5
"""Number of servers lost in a row, without a token in between, after which the rows count as the cause."""


class SglangEngine(GenerateMixin):
    """Generates with one server at a time; implements `InferenceEngine`.

    `find` returns the record of the current server, if there is one; `loader` loads weights into servers.
    """

    def __init__(self, find: Callable[[], ServerRecord | None], loader: WeightLoader, settings: SglangSettings) -> None:
        self._loader, self._settings = loader, settings
        self._connection = ServerConnection(find, settings)
        # Guards `_staged` and `_serving`, which the loader keeps: weights are staged in another thread.
        self._changing = threading.Lock()
        self._staged: StagedWeights | None = None
        self._serving: StagedWeights | None = None
        self._named: dict[str, int] = {}  # versions by the names of their weights on the server
        self._rows = ActiveRows()

    @property
    def losses(self) -> int:
        """Number of servers that were lost."""
        return self._connection.losses

    @property
    def context_length(self) -> int:
        """Largest number of tokens of prompt and completion together."""
        room, own = self._connection.room, self._settings.context_length
        return own if room is None or room.sequence is None else min(own, room.sequence)

    @property
    def joins_freely(self) -> bool:
        """True: the server batches requests as they come."""
        return True

    @property
    def cache_tokens(self) -> int | None:
        """Tokens that the server's key-value cache holds; None if the server does not say."""
        return None if self._connection.room is None else self._connection.room.cache

    def metrics(self) -> dict[str, float]:
        """Return tokens of prompts, those of them in the server's cache, retracted samples, and lost servers."""
        names = ("prompt_tokens", "cached_prompt_tokens", "retracted_samples")
        return {name: float(self._connection.counts[name]) for name in names} | {"lost_servers": float(self.losses)}

    def prepare(self, grammar: str) -> None:
        """Do nothing: the server compiles grammars beside its batch; see `InferenceEngine`."""
        del grammar
        if not self._settings.grammars:
            msg = (
                "a server of rollout.sglang.urls applies no grammars; leave it out, so that the run starts its servers"
            )
            raise ConfigError(msg)

    @property
    def rows(self) -> ActiveRows:
        """Rows in progress."""
        return self._rows

    @property
    def version(self) -> int | None:
        """Version of the weights in use; None before the first."""
        return None if self._serving is None else self._serving.version

    def empty_copy(self) -> HostCopy:
        """Return an empty host copy, of its own if full sets are merged from it; see `WeightConsumer`."""
        return HostCopy(None if self._settings.merged is not None else self._loader.sets, self._settings.named)

    def stage(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Stage weights in the loader; see `WeightConsumer`."""
        if self._settings.merged is not None:
            tensors = self._settings.merged.full_set(version, tensors)
        held, named = tensors if isinstance(tensors, NodeSet) else None, self._settings.named(tensors)
        fingerprint = weights.fingerprint(named) if held is None else held.fingerprint
        staged = StagedWeights(version, fingerprint, self._settings.quantization)
        with self._changing:
            is_kept = staged in (self._staged, self._serving)
            before = self._exchange(staged) if is_kept else None
        if not is_kept:
            self._loader.stage(staged, named, held)
            with self._changing:
                before = self._exchange(staged)
        if before is not None:
            self._loader.forget(before)

    def _exchange(self, staged: StagedWeights) -> StagedWeights | None:
        """Offer weights to the next swap, under `_changing`; return those before if nothing needs them any more."""
        before, self._staged = self._staged, staged
        return None if before in (staged, self._serving) else before

    def swap(self) -> int:
        """Load the staged weights into the server, also during generation; see `WeightConsumer`."""
        with self._changing:
            staged, self._staged = self._staged, None
            if staged is None:
                msg = "no weights are staged; nothing can be swapped"
                raise StoreError(msg)
            before, self._serving = self._serving, staged
            if before is not None and before != staged:
                self._loader.forget(before)  # a server that starts again gets the new ones
        self._named = dict([*self._named.items(), (staged.identity, staged.version)][-MAX_NAMES:])
        try:
            if self._rows.active:
                self._update_in_flight()
            else:
                self._connection.call(self._prepare_idle)
        except (StoreError, EngineError) as error:
            self._withdraw()
            msg = f"weights {staged.version} cannot be served: {error}"
            raise ActorError(msg) from error
        return staged.version

    def _withdraw(self) -> None:
        """Serve no weights until the next swap, and release those in use."""
        with self._changing:
            withdrawn, self._serving = self._serving, None
            if withdrawn is not None and withdrawn != self._staged:
                self._loader.forget(withdrawn)

    def load(self, version: int, fingerprint: str, shards: Sequence[Path]) -> None:
        """Verify, stage and swap to a full set of weights; see `WeightConsumer`."""
        copy = self.empty_copy()
        try:
            copy.apply([WeightUpdate(version, fingerprint, shards)])
        except StoreError:
            self._withdraw()
            raise
        self.stage(version, copy.tensors)
        self.swap()

    def _update_in_flight(self) -> None:
        """Let the samples in progress continue with the weights in use.

        Requests that name an adapter are aborted when the next one is loaded, and their samples requested again; those
        with a grammar cannot, and end with their adapter. Streams abort requests that are left at their next message.
        """
        for sample in () if self._loader.is_adapter else self._rows.samples:
            sample.swapped()
        try:
            if (server := self._connection.server) is None:
                return
            if self._loader.is_adapter:
                self._load_into(server)
                if all(sample.can_continue for sample in self._rows.samples):
                    server.abort()
            else:
                server.pause()
                self._load_into(server)
                server.resume()
        except ServerGoneError as error:
            # The server may only have been slow. `stream` discards it and continues the samples on the next one.
            self._connection.failure = error

    def _prepare_idle(self, server: Server) -> None:
        """Bring a server to the weights in use, with no request running."""
        self._connection.wait_until_idle(server)
        server.end_update()
        self._load_into(server)

    def _load_into(self, server: Server) -> None:
        """Load the weights in use into a server, unless it has them."""
        assert self._serving is not None  # noqa: S101 nothing is served before the first swap
        if self._loader.serves(server, self._serving):
            return
        # Large weights take longer to load than the actor's deadline without progress.
        with ThreadPoolExecutor(1, thread_name_prefix="loading") as thread:
            loading = thread.submit(self._loader.load, server, self._serving)
            while not wait([loading], POLL_SECONDS).done:
                self._settings.progress()
        loading.result()
        if self._loader.is_adapter:
            self._unload_stale(server)

    def _unload_stale(self, server: Server) -> None:
        """Unload adapters that no request uses, also those that an earlier incarnation of the actor loaded."""
        assert self._serving is not None  # noqa: S101 called after it was loaded
        streams = self._connection.streams
        used = {self._serving.identity} | (set() if streams is None else streams.adapters)
        for name in server.adapters() - used:
            server.unload_adapter(name)

    def release_memory(self, folder: Path | None) -> int:
        """Have the server keep its weights in host memory, and forget keys and values; see `ReleasesMemory`."""
        del folder
        return self._connection.release_memory()

    def resume_memory(self) -> int:
        """Have it return; see `ReleasesMemory`."""
        return self._connection.resume_memory()

    def wait_for_server(self) -> None:
        """Wait for a server, so that an actor without one takes no rows; raises ActorError after the deadline."""
        self._connection.call(lambda _: None)

    def stream(
        self,
        requests: Sequence[GenerationRequest],
        progress: Callable[[], None],
        refresh: Refresh | None = None,
        more: MoreRequests = no_more_requests,
    ) -> Iterator[Done]:
        """Generate the samples of all requests, and of those that join; see `InferenceEngine`.

        Raises:
            StoreError: no weights are in use.
            ActorError: there is no server.
            EngineError: the server refuses a request, or was lost `MAX_LOSSES` times in a row.
        """
        if self._serving is None:
            msg = "no verified weights are loaded; nothing can be generated"
            raise StoreError(msg)
        rows = self._rows = ActiveRows(self._settings.moe, self._settings.media)
        rows.add(requests)
        losses = 0
        if not self._settings.keep_partial:
            # The bits of a deterministic run must not depend on what earlier requests left in the key-value cache.
            self._connection.call(self._prepare_idle)
        try:
            while rows.active:
                before = rows.tokens
                if self._connection.server is None:
                    self._connection.call(self._prepare_idle)
                try:
                    yield from self._generate(rows, progress, refresh, more)
                except ServerGoneError as error:
                    self._connection.discard(str(error))
                    # Tokens of rows that join would hide that a row of the first ones kills the servers.
                    more = no_more_requests
                    losses = losses + 1 if rows.tokens <= before else 1
                    if losses > MAX_LOSSES:
                        msg = f"the inference server was lost {losses} times in a row with these rows: {error}"
                        raise EngineError(msg) from error
        finally:
            self._rows = ActiveRows()

    def _generate(
        self, rows: ActiveRows, progress: Callable[[], None], refresh: Refresh | None, more: MoreRequests
    ) -> Iterator[Done]:
        """Generate the active rows with the server in use; raises ServerGoneError if it is gone or hangs."""
        connection = self._connection
        streams, run = connection.streams, connection.loop.run_until_complete
        assert streams is not None  # noqa: S101 the server in use has streams
        tasks: dict[asyncio.Task[None], list[int]] = {}
        received, last_progress = -1, time.monotonic()
        try:
            while rows.active:
                for numbers in self._together(rows.active.keys() - set(chain(*tasks.values()))):
                    samples = [sample for number in numbers for sample in rows.active[number]]
                    tasks[connection.loop.create_task(streams.generate(samples, self._served))] = numbers
                done = run(wait_for_first(tasks, TICK_SECONDS))
                if streams.tokens != received:
                    received, last_progress = streams.tokens, time.monotonic()
                    progress()
                unwanted = rows.inform()
                ended = [task for task in done if task.exception() is None]
                yield [rows.finish(number) for task in ended for number in tasks.pop(task)]
                if unwanted and (left := self._cancel(unwanted, rows, tasks)):
                    yield left
                for task in done:
                    task.result()
                joined = more(self._free_rows(rows)) if rows.active else ()
                rows.add(joined)
                if ended or joined:
                    # The caller may have taken long to write or fetch rows; that is no stall of the server.
                    last_progress = time.monotonic()
                if rows.active and refresh is not None and refresh():
                    last_progress = time.monotonic()
                connection.check_alive(last_progress)
        finally:
            run(cancel_all(tasks))

    def _together(self, numbers: Iterable[int]) -> list[list[int]]:
        """Return which rows share a request: none, or all of them if the batches must not depend on time."""
        ordered = sorted(numbers)
        if self._settings.keep_partial:
            return [[number] for number in ordered]
        return [ordered] if ordered else []

    def _free_rows(self, rows: ActiveRows) -> int:
        settings, limit = self._settings, self._connection.limit.limit
        return min(settings.rows - len(rows.active), (limit - len(rows.samples)) // settings.group)

    def _cancel(self, numbers: Iterable[int], rows: ActiveRows, tasks: dict[asyncio.Task[None], list[int]]) -> Done:
        """End the requests of rows that nobody waits for; the server drops a request whose connection is closed."""
        if not self._settings.keep_partial:
            return []  # rows that share a request end with it
        left = [number for number in numbers if number in rows.active]
        unwanted = [task for task, (number,) in tasks.items() if number in left]
        self._connection.loop.run_until_complete(cancel_all(unwanted))
        for task in unwanted:
            del tasks[task]
        for number in left:
            rows.active[number][0].cancel()
        return [rows.finish(number) for number in left]

    def _served(self) -> Served:
        """Return the weights in use; a server reports the name of the base for tokens of all adapters."""
        assert self._serving is not None  # noqa: S101 `stream` checks it before the first request
        version, loader = self._serving.version, self._loader
        if loader.is_adapter:
            return Served(version, {loader.base: version}, self._serving.identity)
        return Served(version, self._named)

    def close(self) -> None:
        """Disconnect from the server, which stays for the next incarnation or ends with the node."""
        self._connection.close()
        self._loader.close()
