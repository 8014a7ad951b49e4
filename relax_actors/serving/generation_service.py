"""Rollout's end of the gateway: requests arrive over NATS, join the engine's running batch, and are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from broker.codec import decode_fields, encode, open_envelope
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import Generation, GenerationRequest, StopStrings
from relax_actors.engines.protocols.guests import Guest, Guests
from relax_actors.errors import CodecError, ConfigError, RelaxError
from relax_actors.messages.generate import GenerateAnswer, GenerateCall, Refusal, SessionAnswer, SessionCall
from relax_actors.runtime.context import Context

MAX_WAITING = 1024
"""Requests that may wait for the engine; more are refused."""
GREEDY_TEMPERATURE = 1.0
"""Temperature of the log-probs of a request that chooses the most likely tokens."""


class Sessions(Protocol):
    """Sessions of agents that this actor holds. Called in the event loop's thread."""

    async def generate(self, call: GenerateCall) -> GenerateAnswer:
        """Answer a request of a session."""

    async def handle(self, call: SessionCall) -> SessionAnswer:
        """Take, keep, show or end a session."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the service needs of the rollout role.

    Attributes:
        guests: queue of the requests that join the engine's batch.
        tokenizer: tokenizer of the model.
        context_length: largest number of tokens of prompt and answer.
        stops: stop tokens and stop strings of `rollout.stop` and further texts.
        fingerprints: fingerprints of weights by version.
        on_guest: called when a request has joined the queue.
    """

    guests: Guests
    tokenizer: Tokenizer
    context_length: int
    stops: Callable[[list[str]], tuple[frozenset[int], StopStrings | None]]
    fingerprints: Mapping[int, str]
    on_guest: Callable[[], None] = lambda: None


class GenerationService:
    """Answers `relax.<run>.generate.<n>`.

    Args:
        context: context of the actor.
        surroundings: its engine and tokenizer.
    """

    def __init__(self, context: Context, surroundings: Surroundings) -> None:
        self._context, self._around = context, surroundings
        self._sessions: Sessions | None = None
        self._connection = context.table.connection
        self._tasks: set[asyncio.Task[None]] = set()
        self.answered = 0

    def start(self, sessions: Sessions | None = None) -> None:
        """Begin to answer. Called in the role's thread.

        Args:
            sessions: sessions of agents; None in a run without agents.
        """
        self._sessions = sessions
        subject = self._context.table.subjects.service("generate", self._context.n)
        self._connection.call(self._subscribe(subject), 30)

    async def _subscribe(self, subject: str) -> None:
        await self._connection.nc.subscribe(subject, cb=self._on_message)

    async def _on_message(self, message: Msg) -> None:
        # nats-py awaits the callback before it delivers the next message.
        self._spawn(self._serve(message))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, message: Msg) -> None:
        if not message.reply:
            return
        try:
            envelope = open_envelope(message.data)
            if envelope.type == SessionCall.__name__:
                answer: Any = await self._session(decode_fields(envelope, SessionCall))
            else:
                answer = await self._generate(decode_fields(envelope, GenerateCall))
        except CodecError as error:
            answer = GenerateAnswer(refusal=Refusal.INVALID, detail=str(error)[:500])
        try:
            await self._connection.nc.publish(message.reply, encode(answer, self._context.author))
        except (CodecError, NatsError, OSError) as error:
            self._context.journal.event("answer_lost", error=str(error)[:500])
        self.answered += 1

    async def _session(self, call: SessionCall) -> SessionAnswer:
        if self._sessions is not None:
            return await self._sessions.handle(call)
        if call.kind == "take":
            return SessionAnswer()
        return SessionAnswer(refusal=Refusal.ELSEWHERE, detail=f"no actor holds session {call.session[:128]!r}")

    async def _generate(self, call: GenerateCall) -> GenerateAnswer:
        if call.session:
            if self._sessions is None:
                return GenerateAnswer(refusal=Refusal.ENDED, detail=f"this run has no session {call.session[:128]!r}")
            return await self._sessions.generate(call)
        try:
            return await self.ask(self.request(call))
        except Refused as error:
            return error.answer

    def request(self, call: GenerateCall) -> GenerationRequest:
        """Return the request of a call without a session.

        Raises:
            Refused: no answer can be generated.
        """
        settings = self._context.config.rollout
        room = self._around.context_length - len(call.tokens)
        if not len(call.tokens) or room < 1:
            detail = (
                f"the prompt has {len(call.tokens)} tokens; the model's context of {self._around.context_length} "
                "leaves no room for an answer; shorten the conversation"
            )
            raise Refused(Refusal.TOO_LONG if room < 1 else Refusal.INVALID, detail)
        if int(call.tokens.min()) < 0 or int(call.tokens.max()) >= self._around.tokenizer.size:
            raise Refused(Refusal.INVALID, f"the vocabulary has {self._around.tokenizer.size} tokens; one is not in it")
        try:
            stop_ids, stop_strings = self._around.stops(call.stop)
        except ConfigError as error:
            raise Refused(Refusal.INVALID, str(error).replace("rollout.stop", "stop")) from error
        greedy = call.temperature == 0
        temperature = settings.temperature if call.temperature is None else call.temperature
        return GenerationRequest(
            tokens=call.tokens,
            seed=call.seed,
            samples=1,
            temperature=GREEDY_TEMPERATURE if greedy else temperature,
            top_p=settings.top_p if call.top_p is None else call.top_p,
            max_tokens=min(call.max_tokens or settings.max_tokens, room),
            stop_ids=stop_ids,
            greedy_samples=int(greedy),
            stop_strings=stop_strings,
            session=call.affinity,
        )

    async def ask(self, request: GenerationRequest, call: str = "") -> GenerateAnswer:
        """Generate a request in the engine's running batch."""
        if len(self._around.guests) >= MAX_WAITING:
            return GenerateAnswer(refusal=Refusal.BUSY, detail=f"{MAX_WAITING} requests wait for the engine; try again")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Generation | RelaxError] = loop.create_future()

        def done(result: Generation | RelaxError) -> None:
            loop.call_soon_threadsafe(_settle, answer, result)

        self._around.guests.add(Guest(request, done))
        self._around.on_guest()
        self._context.wake()
        found = await answer
        if isinstance(found, RelaxError):
            return GenerateAnswer(refusal=Refusal.FAILED, detail=str(found)[:500], call=call)
        version = int(found.versions[-1]) if len(found.versions) else -1
        return GenerateAnswer(
            prompt=request.tokens,
            tokens=found.tokens,
            logprobs=found.logprobs,
            versions=found.versions,
            finish_reason=str(found.finish_reason),
            fingerprint=self.fingerprint(version),
            call=call,
        )

    def fingerprint(self, version: int) -> str:
        """Return the fingerprint of weights; empty if it is not known."""
        return self._around.fingerprints.get(version, "")

    def close(self) -> None:
        """Stop answering. Called in the role's thread; the connection is closed behind it."""
        for task in list(self._tasks):
            self._connection.loop.call_soon_threadsafe(task.cancel)


class Refused(Exception):  # noqa: N818 an answer, not an error of the program
    """A request that no answer can be generated for; `answer` says why."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.answer = GenerateAnswer(refusal=refusal, detail=detail)


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)
