"""From what a client asks to an HTTP response: prompts, calls of the policy, streams."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.data.tool_call import CLOSING
from relax_actors.messages.generate import GenerateAnswer, GenerateCall, GeneratePiece
from relax_actors.serving.ask import Ask
from relax_actors.serving.completion import Completed
from relax_actors.serving.errors import ApiError, refused
from relax_actors.serving.event_stream import EventStream, wait_for_client
from relax_actors.serving.forms import IN_SESSION, FormGrammars
from relax_actors.serving.live import LiveChoice, LiveStream, Writer, before_marks, visible
from relax_actors.serving.policy import OnPiece, Policy
from relax_actors.serving.prompts import Prompts
from relax_actors.serving.requests import is_retry, player_of
from relax_actors.sessions.dialogue import Dialogue, answer_message, before_stop

HEARTBEAT_SECONDS = 10.0
"""Interval of comments in a stream that waits for its answer."""
COST_SHARE = 9
"""Time between two events of a stream, as a multiple of the time that making them takes."""
Completions: TypeAlias = list[Completed]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and times of the gateway: `[gateway]`."""

    max_body_bytes: int
    max_concurrent: int
    request_seconds: float
    max_lease_seconds: float = 300.0


class Answers:
    """Gets answers from the policy; `prompts` makes the prompts of requests.

    Clients see the model as `model`. `context_length` is the largest number of tokens of prompt and answer, and `kinds`
    are the kinds of media that the model takes.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        model: str,
        context_length: int,
        limits: Limits,
        kinds: Collection[str] = (),
    ) -> None:
        self.policy, self.tokenizer, self.model, self.context_length = policy, tokenizer, model, context_length
        self._dialogue, self._limits = Dialogue(tokenizer, kinds), limits
        self.prompts = Prompts(policy, self._dialogue, limits.request_seconds)
        self._forms = FormGrammars(self._dialogue)
        self._running, self._closed = 0, asyncio.Event()
        self.count = 0

    def close(self) -> None:
        """Refuse the requests that run. Called in the event loop's thread."""
        self._closed.set()

    async def while_open(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of some work; raises ApiError if the gateway stops."""
        doing, closing = asyncio.ensure_future(work), asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({doing, closing}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
        finally:
            doing.cancel()
            closing.cancel()
        raise ApiError(503, "the gateway stops; send the request again", "stopping", 1.0)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request that runs; raises ApiError if too many requests run."""
        if self._running >= self._limits.max_concurrent:
            msg = f"{self._running} requests run, the most that are worked on at once; try again"
            raise ApiError(429, msg, "too_many_requests", 1.0)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self.count += 1

    async def complete(
        self,
        ask: Ask,
        session: str,
        choices: Sequence[LiveChoice] = (),
        *,
        is_retry: bool = False,
        affinity: str = "",
        player: str = "",
    ) -> Completions:
        """Return the answers to what a client asks, in the session of an agent, if any.

        `choices` get pieces of the answers while these are generated; requests with the same `affinity` share a prefix;
        a session's `player` asks; `is_retry` says that the client repeats a request.

        Raises:
            ApiError: there is none; RowError: the template refuses the messages.
        """
        given: dict[str, Any]
        if session and ask.form:
            raise ApiError(400, IN_SESSION, "unsupported_parameter")
        if session:
            given = await self.prompts.in_session(ask, session, player)
        else:
            given = await self.prompts.free(ask)
            if ask.form:
                given["grammar"] = await self._forms.grammar(ask.form, ask.tools, given["tokens"])
        sampling = ask.sampling
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed % 2**62
        calls = [
            GenerateCall(
                call=choices[index].call if choices else uuid4().hex,
                max_tokens=sampling.max_tokens or 0,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=seed + index,
                stop=list(sampling.stop),
                ends=self._ends(ask),
                stop_ids=list(sampling.stop_ids),
                affinity=affinity or session,
                is_retry=is_retry,
                seconds=self._limits.request_seconds,
                stream=bool(choices),
                **given,
            )
            for index in range(1 if session else ask.n)
        ]
        each = await asyncio.gather(*(self._answers(call, ask, choices[index:]) for index, call in enumerate(calls)))
        return [one for answers in each for one in answers]

    def _ends(self, ask: Ask) -> list[str]:
        """Return the text that ends an answer after its first tool call, if the client wants one.

        Raises:
            ApiError: the calls of the model have no such mark.
        """
        tool_format = self._dialogue.format_for(ask.tools)
        if not ask.one_call or tool_format is None or ask.form.forces_call:
            return []
        if (mark := CLOSING.get(tool_format)) is None:
            msg = (
                "parallel_tool_calls = false (disable_parallel_tool_use = true) is not supported with this model: its "
                f"tool calls, of the format {tool_format}, have no closing mark at which an answer could end; "
                "leave it out"
            )
            raise ApiError(400, msg, "unsupported_parameter")
        return [mark]

    async def _answers(self, call: GenerateCall, ask: Ask, choices: Sequence[LiveChoice]) -> Completions:
        """Return the answers to a call; `choices` get the pieces of each."""
        on_piece: OnPiece | None = (lambda piece: choices[piece.index].add(piece)) if choices else None
        answer = await self.while_open(self.policy.generate(call, on_piece))
        if answer.refusal:
            raise refused(answer.refusal, answer.detail)
        return [self._completed(one, call, ask) for one in answer.choices]

    def _completed(self, answer: GenerateAnswer, call: GenerateCall, ask: Ask) -> Completed:
        parsed = self._dialogue.parse(answer.prompt, answer.tokens, ask.tools, ask.sampling.stop)
        stop = self._dialogue.stop_of(answer.tokens, ask.sampling.stop)
        text = before_stop(self.tokenizer.decode(answer.tokens), *stop)
        return Completed(answer.call or call.call, answer, parsed, text)

    async def respond(self, request: Request, ask: Ask, session: str, writer: Writer) -> Response:
        """Return the response of a request, one body or a stream; a client that leaves ends it.

        `writer` makes the body, or the events of a stream.

        Raises:
            ApiError: there is no answer, and the stream has not begun.
        """
        news = asyncio.Event()
        choices = [LiveChoice(index, uuid4().hex, news) for index in range(ask.n if ask.stream else 0)]
        work = asyncio.ensure_future(
            self.complete(ask, session, choices, is_retry=is_retry(request), player=player_of(request))
        )
        try:
            if not ask.stream:
                await wait_for_client(request, work)
                answers = work.result()
                return JSONResponse(writer.whole(answers), background=BackgroundTask(self._delivered, session, answers))
            begun = asyncio.ensure_future(news.wait())
            try:
                await wait_for_client(request, work, begun, seconds=HEARTBEAT_SECONDS)
            finally:
                begun.cancel()
            if work.done():
                work.result()  # an error has a status of its own as long as nothing was sent
        except BaseException:
            work.cancel()
            raise
        self._running += 1  # admitted before, and not to be refused now

        def close() -> None:
            work.cancel()
            self._running -= 1

        return EventStream(self._events(LiveStream(choices, news, work), ask, session, writer), close)

    async def _delivered(self, session: str, answers: Completions) -> None:
        if session:
            await self.policy.delivered(session, answers[0].call)

    async def _events(self, live: LiveStream, ask: Ask, session: str, writer: Writer) -> AsyncIterator[bytes]:
        """Yield the events of a stream, with comments while nothing is new.

        Events are made when the client has read those before, so that one that reads slowly gets fewer, longer ones.
        """
        shown = partial(self._text if writer.is_plain else self._message, ask)
        try:
            while not live.work.done():
                if not await live.wait(HEARTBEAT_SECONDS):
                    yield b": waiting for the policy\n\n"
                    continue
                start = time.monotonic()
                if data := live.events(writer, shown):
                    yield data
                # Each step reads the whole answer, so its share of the time is bounded.
                await asyncio.sleep(min(1.0, COST_SHARE * (time.monotonic() - start)))
            answers = live.work.result()
            texts = [("", one.text) if writer.is_plain else _texts_of(one) for one in answers]
            yield live.end(writer, answers, texts)
            await self._delivered(session, answers)
        except Exception as error:  # noqa: BLE001 the status is sent; the stream has to say it
            known = error if isinstance(error, ApiError) else ApiError(500, f"{type(error).__name__}: {error}")
            yield writer.error(known)

    def _text(self, ask: Ask, piece: GeneratePiece) -> tuple[str, str]:
        return "", before_marks(self.tokenizer.decode(piece.tokens).rstrip("\ufffd"), ask.sampling.stop)

    def _message(self, ask: Ask, piece: GeneratePiece) -> tuple[str, str]:
        dialogue = self._dialogue
        text = before_marks(dialogue.text(piece.tokens, ask.tools).rstrip("\ufffd"), ask.sampling.stop)
        return visible(text, dialogue.format_for(ask.tools), thinks=dialogue.thinks(piece.prompt))


def _texts_of(answer: Completed) -> tuple[str, str]:
    message = answer_message(answer.parsed, answer.call)
    return message.get("reasoning_content", ""), message["content"] or ""
