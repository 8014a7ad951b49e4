"""Requests of a rollout's service and sessions that a test answers in place of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future

from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.errors import ConfigError
from relax_actors.generation.batch import Kind, Samples, Ticket


class Asked:
    """Implements `relax_actors.generation.batch.Generates`.

    Args:
        on_ask: called when a request has arrived.
    """

    def __init__(self, on_ask: Callable[[], None] = lambda: None) -> None:
        self._on_ask = on_ask
        self._waiting: list[Ticket] = []
        self._lock = threading.Lock()
        self.refused = ""
        """Why grammars are refused; empty if they are not."""

    def __len__(self) -> int:
        with self._lock:
            self._waiting = [ticket for ticket in self._waiting if not ticket.samples.cancelled()]
            return len(self._waiting)

    @property
    def service_waiting(self) -> int:
        """Number of requests that wait."""
        return len(self)

    def generate(
        self, request: GenerationRequest, kind: Kind = Kind.SERVICE, *, conversation: Hashable = None, tokens: int = 0
    ) -> Future[Samples]:
        """Keep a request."""
        ticket = Ticket(request, kind, conversation, tokens)
        with self._lock:
            self._waiting.append(ticket)
        self._on_ask()
        return ticket.samples

    def prepare(self, grammar: str) -> None:
        """Refuse grammars, if a test wants it."""
        del grammar
        if self.refused:
            raise ConfigError(self.refused)

    def hold(self, conversation: Hashable, tokens: int) -> None:
        """Do nothing: there is no cache."""

    def release(self, conversation: Hashable) -> None:
        """Do nothing: there is no cache."""

    def take(self, limit: int) -> list[Ticket]:
        """Begin to answer the oldest requests."""
        with self._lock:
            taken, self._waiting = self._waiting[:limit], self._waiting[limit:]
            return [ticket for ticket in taken if ticket.samples.set_running_or_notify_cancel()]


def answer(ticket: Ticket, sample: Generation) -> None:
    """Give a request its sample."""
    ticket.samples.set_result([sample])
