"""A call under way in a rollout actor: its tokens so far, and whether its client has left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages.generate import GeneratePiece

PIECE_SECONDS = 0.01
"""Least time between two pieces of an answer: tokens of fast engines go together."""


class CallWatch:
    """Implements `engines.protocols.Watch`. Create it in the event loop's thread.

    `send` sends a piece of the answer; without it the client wants the whole answer alone.
    """

    def __init__(self, send: Callable[[GeneratePiece], Awaitable[None]] | None = None) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._lock = threading.Lock()
        self._start, self._tokens, self._logprobs = 0, list[int](), list[float]()
        self._cancelled = False
        self._on_cancel: list[Callable[[], None]] = []
        self.generated = 0
        """Number of tokens sampled so far, if tokens are wanted."""

    def of_choice(self, index: int) -> CallWatch:
        """Return the watch of another answer to the call, which is cancelled with this one."""
        send = self._send

        async def send_indexed(piece: GeneratePiece) -> None:
            if send is not None:
                await send(replace(piece, index=index))

        watch = CallWatch(None if send is None else send_indexed)
        self.on_cancel(watch.cancel)
        return watch

    @property
    def is_cancelled(self) -> bool:
        """Whether the client has left."""
        return self._cancelled

    @property
    def wants_tokens(self) -> bool:
        """Whether the client wants pieces of the answer."""
        return self._send is not None

    def on_tokens(self, start: int, tokens: NDArray[Any], logprobs: NDArray[Any]) -> None:
        """Keep tokens for the next piece. Called in the engine's thread."""
        with self._lock:
            is_first = not self._tokens
            if is_first or start < self._start:
                self._start, self._tokens, self._logprobs = start, [], []
            del self._tokens[start - self._start :], self._logprobs[start - self._start :]
            self._tokens += tokens.tolist()
            self._logprobs += logprobs.tolist()
            self.generated = start + len(tokens)
        if is_first:
            self._loop.call_soon_threadsafe(self._news.set)

    async def send_pieces(self, prompt: NDArray[Any]) -> None:
        """Send the tokens of the answer as they are sampled, until cancelled."""
        while self._send is not None:
            await self._news.wait()
            self._news.clear()
            with self._lock:
                tokens, logprobs = np.array(self._tokens, np.int32), np.array(self._logprobs, np.float32)
                start, self._tokens, self._logprobs = self._start, [], []
            await self._send(GeneratePiece(start, prompt, tokens, logprobs))
            prompt = prompt[:0]  # the first piece has it
            await asyncio.sleep(PIECE_SECONDS)

    def cancel(self) -> None:
        """Note that the client has left. Called in the event loop's thread."""
        self._cancelled = True
        while self._on_cancel:
            self._on_cancel.pop()()

    def on_cancel(self, call: Callable[[], None]) -> None:
        """Call something when the client leaves; at once if it has left."""
        self._on_cancel.append(call)
        if self._cancelled:
            self.cancel()
