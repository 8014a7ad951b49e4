"""Requests that join the generation of rows, but belong to no row: those of the gateway."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from relax_actors.engines.protocols.inference import Done, Generation, GenerationRequest
from relax_actors.errors import EngineError, RelaxError

GUESTS = 64
"""Guests that an engine generates at once; further ones wait."""
JOIN_SHARE = 8
"""Requests join at once if the running batch is at most so many times as large: a join copies the cache."""
JOIN_TOKENS = 8
"""Fewer requests wait for the next multiple of so many tokens of the batch, and join together."""
Fits: TypeAlias = Callable[[int, int], bool]
"""Whether a guest that needs so many tokens may begin, behind guests that begin now and need so many together."""


@dataclass(frozen=True, slots=True, eq=False)
class Guest:
    """A request of one sample.

    Attributes:
        request: the request, which fits the context of the model.
        done: called once in the role's thread, with the sample or why there is none; must not block.
    """

    request: GenerationRequest
    done: Callable[[Generation | RelaxError], None]


class Guests:
    """Queue of guests; may be used from any thread."""

    def __init__(self) -> None:
        self._waiting: deque[Guest] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, guest: Guest) -> None:
        """Append a guest.

        Raises:
            ValueError: the request asks for more or less than one sample.
        """
        if guest.request.samples != 1:
            msg = f"a guest asks for {guest.request.samples} samples; send one request for each sample"
            raise ValueError(msg)
        with self._lock:
            self._waiting.append(guest)

    def fitting(self, limit: int, fits: Fits) -> int:
        """Return how many guests may begin now: the oldest ones, up to the first that does not fit.

        Args:
            limit: the most guests.
            fits: asked once for each guest, oldest first, until it says no.
        """
        with self._lock:
            return self._fitting(limit, fits)

    def _fitting(self, limit: int, fits: Fits) -> int:
        found = tokens = 0
        for guest in self._waiting:
            if found >= limit or not fits(guest.request.most_tokens, tokens):
                break
            found, tokens = found + 1, tokens + guest.request.most_tokens
        return found

    def take(self, limit: int, fits: Fits = lambda *_: True) -> list[Guest]:
        """Remove and return the guests that may begin now; see `fitting`."""
        with self._lock:
            return [self._waiting.popleft() for _ in range(self._fitting(limit, fits))]

    def remove(self, guest: Guest) -> None:
        """Remove a guest that nobody waits for; do nothing if it does not wait in the queue."""
        with self._lock, suppress(ValueError):
            self._waiting.remove(guest)


class JoinPace:
    """Decides when requests join a running batch: at once, or several together if a join costs the batch something.

    Args:
        joins_freely: of the engine.
    """

    def __init__(self, *, joins_freely: bool) -> None:
        self._joins_freely, self._tokens = joins_freely, 0

    def step(self, waiting: int, running: int) -> bool:
        """Count a token of the batch; return whether requests join behind it.

        Args:
            waiting: requests that may join now. Others must not count: their number would open a batch that they do
                not join for each request that does, so that each copies the cache alone.
            running: requests of the batch.
        """
        self._tokens += 1
        gathers = not self._joins_freely and self._tokens % JOIN_TOKENS
        return not gathers or waiting * JOIN_SHARE >= running


class InFlight:
    """Requests that an engine generates, by the numbers under which it returns them: the order in which they came."""

    def __init__(self) -> None:
        self._work: dict[int, Any] = {}
        self._tokens: dict[int, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._work)

    def add(self, work: Sequence[tuple[GenerationRequest, Any]]) -> list[GenerationRequest]:
        """Add requests with what their caller knows them by; return the requests for the engine."""
        for request, known_by in work:
            self._work[self._count] = known_by
            self._tokens[self._count] = request.most_tokens
            self._count += 1
        return [request for request, _ in work]

    def fits(self, limit: int | None) -> Fits:
        """Return the rule of batches without a ledger: all requests in flight need at most so many tokens together.

        A guest also begins if no other one is in flight, so that rows do not starve guests; None is no limit.
        """

        def fits(needed: int, ahead: int) -> bool:
            is_first = not (ahead or self.guest_tokens)
            return is_first or limit is None or sum(self._tokens.values()) + ahead + needed <= limit

        return fits

    def invite(self, guests: Guests, most: int, fits: Fits) -> list[GenerationRequest]:
        """Add guests that wait, oldest first.

        Args:
            guests: those that wait.
            most: guests that are in flight at most.
            fits: whether a guest may begin.
        """
        found = guests.take(most - len(self._guests()), fits)
        return self.add([(guest.request, guest) for guest in found])

    def invitable(self, guests: Guests, most: int, fits: Fits) -> int:
        """Return how many guests `invite` would add."""
        return guests.fitting(most - len(self._guests()), fits)

    def _guests(self) -> list[int]:
        return [number for number, known_by in self._work.items() if isinstance(known_by, Guest)]

    @property
    def guest_tokens(self) -> int:
        """Tokens that the guests in flight need at most."""
        return sum(self._tokens[number] for number in self._guests())

    @property
    def has_rows(self) -> bool:
        """Whether a request in flight belongs to a row."""
        return any(not isinstance(one, Guest) for one in self._work.values())

    def take(self, done: Done) -> list[tuple[Any, list[Generation]]]:
        """Remove finished requests, and return those that are no guests; guests get their sample."""
        found = []
        for number, samples in done:
            known_by = self._work.pop(number)
            del self._tokens[number]
            if isinstance(known_by, Guest):
                known_by.done(samples[0])
            else:
                found.append((known_by, samples))
        return found

    def dismiss(self) -> None:
        """Forget all requests, before an engine numbers anew; guests without a sample get an error."""
        for known_by in self._work.values():
            if isinstance(known_by, Guest):
                known_by.done(EngineError("generation has ended before the sample; send the request again"))
        self._work.clear()
        self._tokens.clear()
        self._count = 0
