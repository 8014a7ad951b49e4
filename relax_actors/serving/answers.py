"""From what a client asks to an HTTP response: prompts, calls of the policy, streams."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from starlette.responses import JSONResponse, Response, StreamingResponse

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.messages.generate import GenerateCall
from relax_actors.serving.ask import Ask
from relax_actors.serving.completion import Completed, event
from relax_actors.serving.dialogue import Dialogue
from relax_actors.serving.errors import ApiError, refused
from relax_actors.serving.policy import Policy

HEARTBEAT_SECONDS = 10.0
"""Interval of comments in a stream that waits for its answer."""
PREPARE_SECONDS = 10.0
"""Time to render and tokenize a conversation."""
Found: TypeAlias = list[Completed]


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and times of the gateway: `[gateway]`."""

    max_body_bytes: int
    max_concurrent: int
    request_seconds: float
    max_lease_seconds: float = 300.0


class Answers:
    """Gets answers from the policy.

    Args:
        policy: the live policy.
        tokenizer: tokenizer of the model.
        model: name of the model, as clients see it.
        context_length: largest number of tokens of prompt and answer.
        limits: sizes and times.
    """

    def __init__(self, policy: Policy, tokenizer: Tokenizer, model: str, context_length: int, limits: Limits) -> None:
        self.policy, self.tokenizer, self.model, self.context_length = policy, tokenizer, model, context_length
        self._dialogue, self._limits = Dialogue(tokenizer), limits
        self._running = 0
        self.count = 0

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request that runs.

        Raises:
            ApiError: too many requests run.
        """
        if self._running >= self._limits.max_concurrent:
            msg = f"{self._running} requests run (gateway.max_concurrent); try again"
            raise ApiError(429, msg, "too_many_requests", 1.0)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self.count += 1

    async def prompt(
        self, ask: Ask, settings: Mapping[str, Any] | None = None, *, asks: bool = True
    ) -> NDArray[np.int32]:
        """Return the tokens of a prompt.

        Raises:
            ApiError: it has no tokens, or ids that the vocabulary lacks.
            RowError: the template or the tokenizer refuses it.
        """
        if isinstance(ask.prompt, list):
            size = self.tokenizer.size
            if bad := [token for token in ask.prompt if not 0 <= token < size]:
                msg = f"token {bad[0]} is not in the vocabulary of {size} tokens"
                raise ApiError(400, msg, "invalid_request")
            found = np.array(ask.prompt, np.int32)
        else:
            work = asyncio.to_thread(self._rendered, ask, ask.settings | dict(settings or {}), asks=asks)
            try:
                found = await asyncio.wait_for(work, PREPARE_SECONDS)
            except TimeoutError as error:
                msg = f"the conversation was not tokenized within {PREPARE_SECONDS:g} s; shorten it"
                raise ApiError(400, msg, "too_slow") from error
        if not len(found):
            raise ApiError(400, "the prompt has no tokens; write one", "invalid_request")
        return found

    def _rendered(self, ask: Ask, settings: Mapping[str, Any], *, asks: bool) -> NDArray[np.int32]:
        if isinstance(ask.prompt, str):
            return self.tokenizer.encode(ask.prompt)
        return self._dialogue.prompt(ask.messages, ask.tools, settings, asks=asks)

    async def complete(self, ask: Ask, session: str, *, is_retry: bool = False, affinity: str = "") -> Found:
        """Return the answers to what a client asks.

        Raises:
            ApiError: there is none; RowError: the template refuses the messages.
        """
        conversation: dict[str, Any] = {"messages": ask.messages, "tools": ask.tools, "settings": ask.settings}
        given = {"session": session, **conversation} if session else {"tokens": await self.prompt(ask)}
        sampling = ask.sampling
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed % 2**62
        calls = [
            GenerateCall(
                call=uuid4().hex,
                max_tokens=sampling.max_tokens or 0,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=seed + index,
                stop=list(sampling.stop),
                affinity=affinity or session,
                is_retry=is_retry,
                seconds=self._limits.request_seconds,
                **given,
            )
            for index in range(ask.n)
        ]
        return list(await asyncio.gather(*(self._answer(call, ask.tools) for call in calls)))

    async def _answer(self, call: GenerateCall, tools: Sequence[dict[str, Any]]) -> Completed:
        answer = await self.policy.generate(call)
        if answer.refusal:
            raise refused(answer.refusal, answer.detail)
        parsed = self._dialogue.parse(answer.tokens, tools)
        return Completed(answer.call or call.call, answer, parsed, self.tokenizer.decode(answer.tokens))

    async def respond(
        self,
        work: Coroutine[Any, Any, Found],
        whole: Callable[[Found], dict[str, Any]],
        events: Callable[[Found], Iterator[bytes]] | None,
        *,
        anthropic: bool = False,
    ) -> Response:
        """Return the response of a request: one body, or a stream of events with comments while it waits.

        Args:
            work: gets the answers.
            whole: makes the body.
            events: makes the events of a stream; None for one body.
            anthropic: form of an error within a stream.

        Raises:
            ApiError: there is no answer, and the stream has not begun.
        """
        if events is None:
            return JSONResponse(whole(await work))
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task}, timeout=HEARTBEAT_SECONDS)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.done():
            return _stream(_all(events(task.result())))
        return _stream(self._waiting(task, events, anthropic=anthropic))

    async def _waiting(
        self, task: asyncio.Task[Found], events: Callable[[Found], Iterator[bytes]], *, anthropic: bool
    ) -> AsyncIterator[bytes]:
        with self.admitted():
            try:
                while not task.done():
                    yield b": waiting for the policy\n\n"
                    await asyncio.wait({task}, timeout=HEARTBEAT_SECONDS)
                for data in events(task.result()):
                    yield data
            except Exception as error:  # noqa: BLE001 the status is sent; the stream has to say it
                known = error if isinstance(error, ApiError) else ApiError(500, f"{type(error).__name__}: {error}")
                yield event(known.anthropic(), "error") if anthropic else event(known.openai())
            finally:
                task.cancel()


def _stream(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _all(events: Iterator[bytes]) -> AsyncIterator[bytes]:
    for data in events:
        yield data
