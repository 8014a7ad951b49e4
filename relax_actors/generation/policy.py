"""The policy of a rollout actor: owner of its engine and weights, with one verb, `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext

from relax_actors.engines.backends import inference_backend
from relax_actors.engines.protocols import GenerationRequest
from relax_actors.engines.protocols.inference import Refresh, no_more_requests
from relax_actors.errors import EngineError, RowError
from relax_actors.generation.batch import SERVICE_REQUESTS, Batch, Kind, Samples, Ticket
from relax_actors.runtime import Context
from relax_actors.runtime.profiles import ProfileRequests
from relax_actors.weights.stager import Stager

CACHE_SHARE = 0.9
"""Share of an engine's key-value cache that conversations and service requests may fill together.

The rest is for what a server rounds up to whole pages.
"""


class Policy:
    """Generates what rows, conversations, agents and the gateway ask for, in one running batch.

    `generate` and `prepare` may be called from any thread. All other methods are for the thread that generates.

    Invariant: no sample is generated before the weights are verified. Staged weights are swapped in between batches,
    and within a batch if rollout.in_flight_updates is set.

    Args:
        context: of the actor.
        progress: called at least once for each token of a batch.
        most_service: service requests that are generated at once.
        has_barrier: whether turns wait for each other, so that no limit and no request that joins changes a batch.

    Attributes:
        engine: generates.
        stager: stages and swaps its weights.
        profiles: profiles batches on demand, once it was started.
        model_seconds: CPU time of the engine in this thread.
    """

    def __init__(
        self,
        context: Context,
        progress: Callable[[], None],
        *,
        most_service: int = SERVICE_REQUESTS,
        has_barrier: bool = False,
    ) -> None:
        config = context.config
        self._context, self._progress = context, progress
        backend = inference_backend(config)
        # A server that never leaves the device starts by itself, and takes its memory then.
        stays = backend.server(config) is not None and config.placement.release == "none"
        with nullcontext() if stays else context.device_lock():
            self.engine = backend.build(context)
            context.shares_memory(self.engine)
        self.stager = Stager(context, self.engine)
        self.stager.start()
        self.profiles = ProfileRequests(context, self.engine)
        self._updates_in_flight, self._has_barrier = config.updates_in_flight, has_barrier
        cached = self.engine.cache_tokens
        # Batches of a deterministic run do not depend on what an actor has generated before.
        limits = (
            (None, None) if has_barrier else (config.rollout.max_running_tokens, cached and int(CACHE_SHARE * cached))
        )
        self._batch = Batch(
            *limits,
            joins_freely=self.engine.joins_freely,
            most_service=most_service,
            service_alone=config.run.deterministic,
        )
        self._on_service: list[Callable[[], None]] = []
        self.model_seconds = 0.0

    def generate(
        self, request: GenerationRequest, kind: Kind = Kind.SERVICE, *, conversation: Hashable = None, tokens: int = 0
    ) -> Future[Samples]:
        """Ask for the samples of a request.

        Args:
            request: the request, which fits the context of the model.
            kind: what it is for.
            conversation: conversation of a turn.
            tokens: that it needs at most with its whole conversation; by default those of the request.

        Returns:
            A future whose callbacks run in the thread that generates. A request whose future is cancelled while it
            waits is not generated; `request.watch` ends it later.

        Raises:
            ValueError: a turn or a service request asks for more or less than one sample.
        """
        ticket = Ticket(request, kind, conversation, tokens)
        self._batch.add(ticket)
        if kind is Kind.SERVICE:
            for call in self._on_service:
                call()
            self._context.wake()
        return ticket.samples

    def prepare(self, grammar: str) -> None:
        """Make a grammar ready for requests, in any thread; see `InferenceEngine.prepare`."""
        self.engine.prepare(grammar)

    def on_service(self, call: Callable[[], None]) -> None:
        """Have something called whenever a service request waits, in the thread that asks for it."""
        self._on_service.append(call)

    @property
    def service_waiting(self) -> int:
        """Number of service requests that wait."""
        return self._batch.service_waiting

    def hold(self, conversation: Hashable, tokens: int) -> None:
        """Hold the tokens of a conversation in the engine's cache until its next turn."""
        self._batch.hold(conversation, tokens)

    def release(self, conversation: Hashable) -> None:
        """Release the tokens of a conversation."""
        self._batch.release(conversation)

    def refresh_of(self, version: int | None) -> Refresh | None:
        """Return the function that swaps weights within a batch; None if it keeps its weights."""
        return self.stager.refresh if version is None and self._updates_in_flight else None

    def waits_for_weights(self, version: int | None) -> bool:
        """Whether newer weights are staged that only the end of the running batch lets in."""
        return version is None and self.refresh_of(version) is None and self.stager.has_newer

    def run(
        self,
        version: int | None,
        exchange: Callable[[int], None] = lambda _: None,
        admits: Callable[[], bool] = lambda: True,
    ) -> Iterator[None]:
        """Generate waiting and joining requests; yield between two tokens, after samples are done.

        Ends when nothing runs and nothing joins. An exact `version` in use is kept; without it, newer weights may be
        swapped in. `exchange` is called before requests join, with the number of rows that the engine has room for;
        service requests begin and join if `admits`.
        """

        def join(limit: int) -> list[GenerationRequest]:
            exchange(limit)
            return self._batch.join(service=admits())

        if not (first := self._batch.begin(service=admits())):
            return
        more = no_more_requests if self._has_barrier else join
        self.profiles.begin()
        cpu_start = time.thread_time()
        try:
            for done in self.engine.stream(first, self._progress, self.refresh_of(version), more):
                self.model_seconds += time.thread_time() - cpu_start
                self._batch.finish(done)
                yield
                cpu_start = time.thread_time()
        finally:
            self._batch.abandon()
            self.profiles.end_step()

    def answer(self, requests: Sequence[GenerationRequest], version: int | None) -> list[Samples]:
        """Generate requests as one closed batch, with an exact version if given; return the samples."""
        pending = [self.generate(request, Kind.ROW) for request in requests]
        for _ in self.run(version, admits=lambda: False):
            pass
        return [samples.result(0) for samples in pending]

    def give_up(self) -> None:
        """Forget the rows and turns that wait: those who asked for them have given them up."""
        self._batch.forget_rows()

    def serve(self, until: Callable[[], bool]) -> None:
        """Generate service requests until none waits.

        After `until` has returned true, no further service request is taken, and those in flight are finished.
        """
        while self.service_waiting and not until():
            try:
                self.stager.use_newest(0)
            except RowError:
                none = EngineError("the run has not published weights yet; send the request again")
                self._batch.refuse_service(none)
                return
            # Requests that never cease would keep newer weights from being used.
            for _ in self.run(None, admits=lambda: not (self.waits_for_weights(None) or until())):
                pass

    def close(self) -> None:
        """Stop to stage weights, and release the engine."""
        self.stager.close()
        self.engine.close()
