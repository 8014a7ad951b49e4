"""Which turns may begin: those whose conversations fit an engine's key-value cache together.

Invariant: turns that run never need more tokens than the engine has, so that it never has to take a sample back. A
conversation holds its tokens from its first turn to its end, also while it waits for its environment: otherwise others
would push it out of the cache, and each of its turns would read it from the beginning. If conversations grow beyond the
cache, the youngest ones wait until older ones have ended.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

Conversation = TypeVar("Conversation", bound=Hashable)


class TokenLedger:
    """Tokens of conversations, in the order of their first turns. Decides without input and output.

    Args:
        running: tokens of all conversations in generation, with what their turns may add; None without a limit.
        cached: tokens that the engine's cache holds; None without a limit.
    """

    def __init__(self, running: int | None, cached: int | None) -> None:
        limits = [limit for limit in (running, cached) if limit is not None]
        self._running_limit, self._cached_limit = min(limits, default=None), cached
        self._held: dict[Hashable, int] = {}
        self._running: dict[Hashable, int] = {}

    @property
    def has_limit(self) -> bool:
        """Whether any turn may have to wait."""
        return self._running_limit is not None

    def oldest_first(self, conversations: Iterable[Conversation]) -> list[Conversation]:
        """Sort conversations by their first turns; new ones stay in order behind the others."""
        places = {conversation: i for i, conversation in enumerate(self._held)}
        return sorted(conversations, key=lambda one: places.get(one, len(places)))

    def begin(self, conversation: Hashable, tokens: int) -> bool:
        """Begin a turn if there is room for it, or if no other runs.

        Args:
            conversation: identifies it.
            tokens: of the conversation, with those that its turn may add.
        """
        if self._running and not self._fits(conversation, tokens):
            return False
        self._held[conversation] = self._running[conversation] = tokens
        return True

    def _fits(self, conversation: Hashable, tokens: int) -> bool:
        if self._running_limit is not None and sum(self._running.values()) + tokens > self._running_limit:
            return False
        if self._cached_limit is None:
            return True
        older = 0
        for other, held in self._held.items():
            if other == conversation:
                break
            older += held
        return older + tokens <= self._cached_limit

    def wait(self, conversation: Hashable, tokens: int) -> None:
        """End a turn of a conversation, which holds its tokens while it waits for its environment."""
        if self._running.pop(conversation, None) is not None:
            self._held[conversation] = tokens

    def end(self, conversation: Hashable) -> None:
        """Release the tokens of a conversation."""
        self._running.pop(conversation, None)
        self._held.pop(conversation, None)
