"""Calls of rollout actors that died before they answered: a call may be the cause."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from relax_actors.messages.generate import GenerateCall

MAX_DEATHS = 2
"""Actors that may die with a call before it is no longer sent, if `supervision.max_failures` is larger: rows that were
generated beside it would be quarantined."""
PROBATION_SECONDS = 1.0
"""Time that a suspect has to itself, so that the next death is blamed on it alone."""
FORGET_SECONDS, MAX_CALLS = 600.0, 4096


@dataclass(slots=True)
class _Suspect:
    """Actors that died with a call, as number and incarnation, and the time of the last death."""

    actors: set[tuple[int, int]] = field(default_factory=set)
    died: float = 0.0


class SuspectCalls:
    """Counts the deaths of actors by request, so that a repeated request is recognised.

    Used in the event loop's thread.
    """

    def __init__(self) -> None:
        self._suspects: dict[str, _Suspect] = {}
        self._turn = asyncio.Lock()

    def deaths(self, call: GenerateCall) -> int:
        """Return the number of actors that died with a call and did not answer it later."""
        suspect = self._suspects.get(_key(call)) if self._suspects else None
        if suspect is None or time.monotonic() - suspect.died > FORGET_SECONDS:
            return 0
        return len(suspect.actors)

    def blame(self, call: GenerateCall, n: int, incarnation: int) -> None:
        """Note that an incarnation of an actor died before it answered a call."""
        key, before = _key(call), self.deaths(call)
        suspect = self._suspects.pop(key, _Suspect()) if before else _Suspect()
        suspect.actors.add((n, incarnation))
        suspect.died = time.monotonic()
        self._suspects[key] = suspect
        while len(self._suspects) > MAX_CALLS:
            del self._suspects[next(iter(self._suspects))]

    def acquit(self, call: GenerateCall) -> None:
        """Note that an actor has answered a call."""
        if self._suspects:
            self._suspects.pop(_key(call), None)

    @asynccontextmanager
    async def turn(self, call: GenerateCall) -> AsyncIterator[None]:
        """Wait for the turn of a suspect: one at a time, `PROBATION_SECONDS` apart."""
        if not self.deaths(call):
            yield
            return
        await self._turn.acquire()
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._turn.release()

        timer = asyncio.get_running_loop().call_later(PROBATION_SECONDS, release)
        try:
            yield
        finally:
            timer.cancel()
            release()


def _key(call: GenerateCall) -> str:
    """Return a hash of what an actor reads of a call, without its session."""
    content = json.dumps([call.text, call.messages, call.tools, call.settings], sort_keys=True, default=repr)
    return hashlib.sha256(content.encode(errors="surrogatepass") + call.tokens.tobytes()).hexdigest()
