"""Admission of turns and service requests: those that fit the key-value cache together.

A service request, such as one of the gateway, joins the turns of episodes; it is a conversation of one turn.

Invariant: turns and service requests that run together never need more tokens than the engine has, so that it never has
to take a sample back. Only a turn or request that exceeds the limit by itself does, and it runs alone.

A conversation holds its tokens from its first turn to its end, also while it waits for its environment: otherwise
others would push it out of the cache, and each of its turns would read it from the beginning. If conversations grow
beyond the cache, the youngest ones wait until older ones have ended. A first service request may push waiting
conversations out; further ones begin only in what conversations leave.

Neither side starves the other. While no service request is in flight, turns leave room for the oldest request that
waits: it waits for the turns that run. A turn that only service requests keep waiting gets its room first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Conversation = TypeVar("Conversation", bound=Hashable)


class TokenLedger:
    """Tokens of conversations in the order of their first turns; pure.

    All conversations and service requests in generation, with what their turns may add, have at most `running` tokens,
    and the engine's cache holds `cached`; None without a limit. `service_tokens` returns the tokens that the service
    requests in flight need at most.
    """

    def __init__(self, running: int | None, cached: int | None, service_tokens: Callable[[], int] = lambda: 0) -> None:
        limits = [limit for limit in (running, cached) if limit is not None]
        self._running_limit, self._cached_limit = min(limits, default=None), cached
        self._held: dict[Hashable, int] = {}
        self._running: dict[Hashable, int] = {}
        self._service_tokens = service_tokens
        # Room of the service request that waits for turns, and of the turn that waits for service requests; never both.
        self._service_room = 0
        self._turn_room: dict[Hashable, int] = {}

    @property
    def has_limit(self) -> bool:
        """Whether any turn may have to wait."""
        return self._running_limit is not None

    @property
    def is_used(self) -> bool:
        """Whether a conversation holds tokens."""
        return bool(self._held)

    def oldest_first(self, conversations: Iterable[Conversation]) -> list[Conversation]:
        """Sort conversations by their first turns; new ones stay in order behind the others."""
        places = {conversation: i for i, conversation in enumerate(self._held)}
        return sorted(conversations, key=lambda one: places.get(one, len(places)))

    def begin(self, conversation: Hashable, tokens: int) -> bool:
        """Begin a turn if its conversation fits with what it may add, or if nothing else runs."""
        self._turn_room.clear()
        if self._fits(conversation, tokens, self._service_tokens() + self._service_room):
            self._held[conversation] = self._running[conversation] = tokens
            return True
        if not self._service_room and self._fits(conversation, tokens, 0):
            self._turn_room[conversation] = tokens
        return False

    def _fits(self, conversation: Hashable, tokens: int, service: int) -> bool:
        """Whether there is room for a turn beside service requests of so many tokens."""
        if not self._running and not service:
            return True
        if self._running_limit is not None and sum(self._running.values()) + service + tokens > self._running_limit:
            return False
        if self._cached_limit is None:
            return True
        older = 0
        for other, held in self._held.items():
            if other == conversation:
                break
            older += held
        return older + service + tokens <= self._cached_limit

    def service_fits(self, tokens: int, ahead: int) -> bool:
        """Whether a request of `tokens` fits behind others with `ahead` tokens, or runs alone."""
        service, kept = self._service_tokens() + ahead, sum(self._turn_room.values())
        running = sum(self._running.values()) + service + kept
        if self._running_limit is None or not running:
            return True
        if running + tokens > self._running_limit:
            return False
        is_first = not service and not kept
        held = sum(self._held.values()) + service + kept
        return is_first or self._cached_limit is None or held + tokens <= self._cached_limit

    def begin_service(self, tokens: int, ahead: int) -> bool:
        """Return `service_fits`; a first request that does not fit keeps turns from its room."""
        fits = self.service_fits(tokens, ahead)
        waits = not (fits or ahead or self._service_tokens() or self._turn_room)
        self._service_room = tokens if waits else 0
        return fits

    def withdraw_service(self) -> None:
        """Keep no room for a service request: it may have left, or may not begin now. It asks again."""
        self._service_room = 0

    def wait(self, conversation: Hashable, tokens: int) -> None:
        """End a turn of a conversation, which holds its tokens while it waits for its environment."""
        if self._running.pop(conversation, None) is not None:
            self._held[conversation] = tokens

    def end(self, conversation: Hashable) -> None:
        """Release the tokens of a conversation."""
        for tokens in (self._running, self._held, self._turn_room):
            tokens.pop(conversation, None)
