"""Requests that join the generation of rows, but belong to no row: those of the gateway."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from relax_actors.engines.protocols.inference import Done, Generation, GenerationRequest
from relax_actors.errors import EngineError, RelaxError

GUESTS = 64
"""Guests that an engine generates at once; further ones wait."""
JOIN_SHARE, JOIN_TOKENS = 8, 8
"""Requests join a batch that is at most so many times as large, or after so many tokens: a join copies the cache."""


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
        self._waiting.append(guest)

    def take(self, limit: int, tokens: int | None = None, least: int = 0) -> list[Guest]:
        """Remove and return guests, oldest first.

        Args:
            limit: the most guests.
            tokens: the most tokens that they need together; None without a limit.
            least: so many are returned, whatever tokens they need.
        """
        found: list[Guest] = []
        if not self._waiting:
            return found
        with self._lock:
            while self._waiting and len(found) < limit:
                needed = self._waiting[0].request.most_tokens
                if tokens is not None:
                    if needed > tokens and len(found) >= least:
                        break
                    tokens -= needed
                found.append(self._waiting.popleft())
        return found

    def remove(self, guest: Guest) -> None:
        """Remove a guest that nobody waits for; do nothing if it does not wait in the queue."""
        with self._lock, suppress(ValueError):
            self._waiting.remove(guest)


class JoinPace:
    """Says when requests join a running batch: at once, or several at a time if a join costs the batch something.

    Args:
        joins_freely: of the engine.
    """

    def __init__(self, *, joins_freely: bool) -> None:
        self._joins_freely, self._tokens = joins_freely, 0

    def lets_in(self, waiting: int, running: int) -> bool:
        """Whether requests that wait join now; call it once for each token."""
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

    def invite(self, guests: Guests, most: int = GUESTS, tokens: int | None = None) -> list[GenerationRequest]:
        """Add guests that wait, oldest first; one at least, if none is in flight.

        Args:
            guests: those that wait.
            most: guests that are in flight at most.
            tokens: tokens that all requests in flight need at most, those of rows included; None without a limit.
        """
        if not len(guests):
            return []
        present = sum(isinstance(one, Guest) for one in self._work.values())
        free = None if tokens is None else tokens - sum(self._tokens.values())
        found = guests.take(most - present, free, least=0 if present else 1)
        return self.add([(guest.request, guest) for guest in found])

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
