"""Requests of a rollout actor: which wait, which run together, and which begin next.

Rows, turns of conversations, and requests that belong to no row (service requests) are all tickets. Rows begin at once,
because the role only takes as many as the engine has room for. Turns and service requests wait until they fit, the
oldest first; see `TokenLedger`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol, TypeAlias

from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.engines.protocols.inference import Done
from relax_actors.errors import EngineError, RelaxError
from relax_actors.generation.token_ledger import TokenLedger

SERVICE_REQUESTS = 64
"""Service requests that are generated at once; further ones wait."""
JOIN_SHARE = 8
"""Requests join at once if the running batch is at most so many times as large: a join copies the cache."""
JOIN_TOKENS = 8
"""Fewer requests wait for the next multiple of so many tokens of the batch, and join together."""
Samples: TypeAlias = list[Generation]


class Kind(Enum):
    """What a ticket is for."""

    ROW = auto()
    TURN = auto()
    SERVICE = auto()


@dataclass(slots=True, eq=False)
class Ticket:
    """A request, and the samples that it will have.

    Attributes:
        request: the request, which fits the context of the model.
        kind: what it is for.
        conversation: conversation of a turn; its tokens stay in the cache until `Batch.release`.
        tokens: that it needs at most, with those of the whole conversation.
        samples: gets the samples or an error in the thread that generates; its callbacks must not block. A ticket whose
            future is cancelled before it begins never begins.
    """

    request: GenerationRequest
    kind: Kind = Kind.ROW
    conversation: Hashable = None
    tokens: int = 0
    samples: Future[Samples] = field(default_factory=Future)

    def __post_init__(self) -> None:
        """Check the request; raises ValueError unless turns and service requests ask for one sample."""
        if self.kind is not Kind.ROW and self.request.samples != 1:
            msg = (
                f"a request of kind {self.kind.name} asks for {self.request.samples} samples; send one request for each"
            )
            raise ValueError(msg)
        self.tokens = self.tokens or self.request.most_tokens


class Generates(Protocol):
    """What rows, conversations and services need of a policy; see `generation.policy.Policy`."""

    @property
    def service_waiting(self) -> int:
        """Number of service requests that wait."""

    def generate(
        self, request: GenerationRequest, kind: Kind = Kind.SERVICE, *, conversation: Hashable = None, tokens: int = 0
    ) -> Future[Samples]:
        """Ask for the samples of a request."""

    def prepare(self, grammar: str) -> None:
        """Make a grammar ready for requests; see `InferenceEngine.prepare`."""

    def hold(self, conversation: Hashable, tokens: int) -> None:
        """Hold the tokens of a conversation in the cache until its next turn."""

    def release(self, conversation: Hashable) -> None:
        """Release the tokens of a conversation."""


class JoinPace:
    """Decides when requests join a running batch: at once, or together if a join is expensive."""

    def __init__(self, *, joins_freely: bool) -> None:
        self._joins_freely, self._tokens = joins_freely, 0

    def step(self, waiting: int, running: int) -> bool:
        """Count a token of the batch of `running` requests; return whether requests join behind it.

        Only requests that may join now are `waiting`: others would open a batch that they do not join for each request
        that does, so that each copies the cache alone.
        """
        self._tokens += 1
        gathers = not self._joins_freely and self._tokens % JOIN_TOKENS
        return not gathers or waiting * JOIN_SHARE >= running


class Batch:
    """Waiting and running requests of one engine. `add` and `len` may be called from any thread.

    Turns and service requests in generation need at most `running_limit` tokens together, and the engine's cache holds
    `cached_limit`; None without a limit. `joins_freely` says that a request that joins costs the others nothing.
    At most `most_service` service requests are generated at once, each by itself (`service_alone`) where bits depend on
    the batch.
    """

    def __init__(
        self,
        running_limit: int | None,
        cached_limit: int | None,
        *,
        joins_freely: bool,
        most_service: int = SERVICE_REQUESTS,
        service_alone: bool = False,
    ) -> None:
        self._limit = min((n for n in (running_limit, cached_limit) if n is not None), default=None)
        self._joins_freely, self._most_service, self._service_alone = joins_freely, most_service, service_alone
        self._ledger = TokenLedger(running_limit, cached_limit, lambda: self.service_tokens)
        self._pace = JoinPace(joins_freely=joins_freely)
        self._waiting: dict[Kind, deque[Ticket]] = {kind: deque() for kind in Kind}
        self._lock = threading.Lock()
        # By the numbers under which the engine returns them: the order in which they began.
        self._running: dict[int, Ticket] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of tickets that wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def service_waiting(self) -> int:
        """Number of service requests that wait."""
        return len(self._waiting[Kind.SERVICE])

    @property
    def service_tokens(self) -> int:
        """Tokens that the service requests in generation need at most."""
        return sum(ticket.tokens for ticket in self._running.values() if ticket.kind is Kind.SERVICE)

    def add(self, ticket: Ticket) -> None:
        """Append a ticket."""
        with self._lock:
            self._waiting[ticket.kind].append(ticket)
        ticket.samples.add_done_callback(lambda _: self._withdraw(ticket))

    def _withdraw(self, ticket: Ticket) -> None:
        """Remove a ticket that was cancelled while it waited."""
        if ticket.samples.cancelled():
            with self._lock:
                queue = self._waiting[ticket.kind]
                if ticket in queue:
                    queue.remove(ticket)

    def hold(self, conversation: Hashable, tokens: int) -> None:
        """Hold the tokens of a conversation in the cache until its next turn."""
        self._ledger.wait(conversation, tokens)

    def release(self, conversation: Hashable) -> None:
        """Release the tokens of a conversation."""
        self._ledger.end(conversation)

    def begin(self, *, service: bool = True) -> list[GenerationRequest]:
        """Begin a batch, or let requests join it; return those that begin."""
        self._ledger.withdraw_service()
        with self._lock:
            rows = list(self._waiting[Kind.ROW])
            self._waiting[Kind.ROW].clear()
        begun = self._start(rows)
        with self._lock:
            requests = self._take_service() if service else []
        begun += self._start(requests)  # before turns are weighed: they share the room
        with self._lock:
            joining = self._take_turns()
        return begun + self._start(joining)

    def join(self, *, service: bool = True) -> list[GenerationRequest]:
        """Count a token of the running batch; return the requests that join it. Rows join at once."""
        ready = len(self._waiting[Kind.TURN])
        if service and self._waiting[Kind.SERVICE]:
            ready += self.service_ready()
        opens = self._pace.step(ready, len(self._running)) and ready
        return self.begin(service=service) if opens or self._waiting[Kind.ROW] else []

    def service_ready(self) -> int:
        """Return how many service requests `begin` would let begin."""
        with self._lock:
            return self._count_fitting(reserves=False)

    def _take_service(self) -> list[Ticket]:
        return [self._waiting[Kind.SERVICE].popleft() for _ in range(self._count_fitting(reserves=True))]

    def _count_fitting(self, *, reserves: bool) -> int:
        """Return how many service requests fit now, counted from the oldest.

        With `reserves`, turns leave room for that first service request.
        """
        fitting = tokens = 0
        for ticket in self._waiting[Kind.SERVICE]:
            if fitting >= self._free_service() or not self._service_fits(ticket.tokens, tokens, reserves=reserves):
                break
            fitting, tokens = fitting + 1, tokens + ticket.tokens
        return fitting

    def _free_service(self) -> int:
        if self._service_alone:
            return int(not (self._running or self._waiting[Kind.TURN] or self._waiting[Kind.ROW]))
        return self._most_service - sum(ticket.kind is Kind.SERVICE for ticket in self._running.values())

    def _service_fits(self, tokens: int, ahead: int, *, reserves: bool) -> bool:
        if self._ledger.is_used:
            return (self._ledger.begin_service if reserves else self._ledger.service_fits)(tokens, ahead)
        # Rows leave no room: the first service request begins all the same, so that they do not starve it.
        is_first = not (ahead or self.service_tokens)
        together = sum(ticket.tokens for ticket in self._running.values()) + ahead + tokens
        return is_first or self._limit is None or together <= self._limit

    def _take_turns(self) -> list[Ticket]:
        """Take the turns that there is room for, those of the oldest conversations first."""
        waiting = self._waiting[Kind.TURN]
        if self._ledger.has_limit:
            by_conversation = {ticket.conversation: ticket for ticket in waiting}
            waiting = deque(by_conversation[one] for one in self._ledger.oldest_first(by_conversation))
        fitting = []
        while waiting and self._ledger.begin(waiting[0].conversation, waiting[0].tokens):
            fitting.append(waiting.popleft())
        self._waiting[Kind.TURN] = waiting
        return fitting

    def _start(self, tickets: Iterable[Ticket]) -> list[GenerationRequest]:
        requests = []
        for ticket in tickets:
            if ticket.samples.set_running_or_notify_cancel():
                self._running[self._count] = ticket
                self._count += 1
                requests.append(ticket.request)
        return requests

    def finish(self, done: Done) -> None:
        """Give tickets their samples."""
        for number, samples in done:
            self._running.pop(number).samples.set_result(samples)

    def abandon(self, why: RelaxError | None = None) -> None:
        """End a batch, before an engine numbers anew; tickets without samples get an error."""
        error = why or EngineError("generation has ended before the sample; send the request again")
        running, self._running, self._count = self._running, {}, 0
        self._pace = JoinPace(joins_freely=self._joins_freely)
        for ticket in running.values():
            self._ledger.end(ticket.conversation)
            ticket.samples.set_exception(error)

    def refuse_service(self, error: RelaxError) -> None:
        """Give all service requests that wait an error."""
        with self._lock:
            waiting, self._waiting[Kind.SERVICE] = self._waiting[Kind.SERVICE], deque()
        for ticket in waiting:
            if ticket.samples.set_running_or_notify_cancel():
                ticket.samples.set_exception(error)

    def forget_rows(self) -> None:
        """Forget the rows and turns that wait: those who asked for them have given them up."""
        with self._lock:
            for kind in (Kind.ROW, Kind.TURN):
                for ticket in self._waiting[kind]:
                    self._ledger.end(ticket.conversation)
                self._waiting[kind].clear()
