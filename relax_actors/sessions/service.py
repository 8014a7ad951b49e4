"""The gateway's requests in a rollout actor: they arrive over NATS and join its batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from broker.codec import decode, decode_fields, encode, open_envelope
from broker.subjects import RowId
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import Generation, GenerationRequest, PromptMedia, StopStrings
from relax_actors.errors import CodecError, ConfigError, RelaxError, RowError, SlowRowError, TooLongError
from relax_actors.generation.batch import Generates
from relax_actors.messages import FinishReason
from relax_actors.messages.generate import (
    STILL_WORKING,
    CallNote,
    GenerateAnswer,
    GenerateCall,
    GeneratePiece,
    Refusal,
    SessionAnswer,
    SessionCall,
)
from relax_actors.runtime.context import Context
from relax_actors.sessions.call_watch import CallWatch
from relax_actors.sessions.message_media import MessageMedia
from relax_actors.training.stops import stops_of

if TYPE_CHECKING:
    from nats.aio.msg import Msg  # `relax check` loads every role, and imports no broker client

ALIVE_SECONDS = 20.0
"""Interval of `STILL_WORKING` to a client that waits; the server forgets its reply subject after
`broker.accounts.ANSWER_SECONDS`."""
MAX_WAITING = 1024
"""Requests that may wait for the engine; more are refused."""
LEFT = "the client has left; nothing was recorded"
GREEDY_TEMPERATURE = 1.0
"""Temperature of the log-probs of a request that chooses the most likely tokens."""


class Sessions(Protocol):
    """Sessions of agents that this actor holds. Called in the event loop's thread."""

    async def generate(self, call: GenerateCall, watch: CallWatch, author: str) -> GenerateAnswer:
        """Answer a request of a session that a gateway's incarnation, `author`, has sent."""

    def on_arrival(self, call: str) -> None:
        """Take notice that the client of a call has the answer."""

    def on_departure(self, call: str) -> None:
        """Take notice that the client of a call has left without the answer."""

    async def handle(self, call: SessionCall) -> SessionAnswer:
        """Take, keep, show or end a session."""


class GenerationService:
    """Answers `relax.<run>.request.generate.<n>`.

    `room` is the largest number of tokens of prompt and answer. `stops` returns the stop tokens and stop strings of
    `rollout.stop` and further texts, `fingerprints` has those of weights by version. `media` is None for a model that
    reads text only.
    """

    def __init__(
        self,
        context: Context,
        policy: Generates,
        tokenizer: Tokenizer,
        room: int,
        stops: Callable[[list[str]], tuple[frozenset[int], StopStrings | None]],
        fingerprints: Mapping[int, str],
        media: MessageMedia | None = None,
    ) -> None:
        self._context, self._policy, self._tokenizer = context, policy, tokenizer
        self._room, self._stops, self._fingerprints, self._media = room, stops, fingerprints, media
        self._sessions: Sessions | None = None
        self._connection = context.table.connection
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: dict[str, set[CallWatch]] = {}
        # Folder of the store with the media of requests that belong to no session, and numbers of these requests.
        self._folder, self._serials = f"calls-{context.n}", count()
        self.answered = self.cancelled = 0

    def start(self, sessions: Sessions | None = None) -> None:
        """Begin to answer, with the sessions of a run with agents. Called in the role's thread."""
        self._sessions = sessions
        self._context.table.store.remove(self._folder)  # of a killed incarnation
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
            self._note(message.data)
            return
        answering = asyncio.ensure_future(self._answer(message.data, message.reply))
        try:
            while not (await asyncio.wait({answering}, timeout=ALIVE_SECONDS))[0]:
                await self._connection.nc.publish(message.reply, STILL_WORKING)
            await self._connection.nc.publish(message.reply, encode(answering.result(), self._context.author))
        except Exception as error:  # noqa: BLE001 of the broker or of one request; the service goes on
            self._context.journal.event("answer_lost", error=f"{type(error).__name__}: {error}"[:500])
        finally:
            answering.cancel()
        self.answered += 1

    def _note(self, data: bytes) -> None:
        """Stop to generate for a client that has left, or remember that it has its answer."""
        try:
            note = decode(data, CallNote)
        except CodecError as error:
            self._context.journal.event("note_malformed", error=str(error)[:500])
            return
        for watch in () if note.arrived else self._watches.get(note.call, ()):
            watch.cancel()
            self.cancelled += 1
            self._context.journal.event("request_cancelled", call=note.call, tokens=watch.generated)
        if self._sessions is not None:
            (self._sessions.on_arrival if note.arrived else self._sessions.on_departure)(note.call)

    async def _answer(self, data: bytes, reply: str) -> GenerateAnswer | SessionAnswer:
        kind: type[GenerateAnswer | SessionAnswer] = GenerateAnswer
        try:
            envelope = open_envelope(data)
            if envelope.type == SessionCall.__name__:
                kind = SessionAnswer
                return await self._session(decode_fields(envelope, SessionCall))
            return await self._generate(decode_fields(envelope, GenerateCall), envelope.author, reply)
        except CodecError as error:
            return kind(refusal=Refusal.INVALID, detail=str(error)[:500])
        except Exception as error:  # noqa: BLE001 a request without an answer would be waited for in vain
            detail = f"{type(error).__name__}: {error}"[:500]
            self._context.journal.event("request_failed", error=detail)
            return kind(refusal=Refusal.FAILED, detail=detail)

    async def _session(self, call: SessionCall) -> SessionAnswer:
        if self._sessions is not None:
            return await self._sessions.handle(call)
        if call.kind == "take":
            return SessionAnswer()
        return SessionAnswer(refusal=Refusal.ELSEWHERE, detail=f"no actor holds session {call.session[:128]!r}")

    async def _generate(self, call: GenerateCall, author: str, reply: str) -> GenerateAnswer:
        async def send(piece: GeneratePiece) -> None:
            await self._connection.nc.publish(reply, encode(piece, self._context.author))

        watch = CallWatch(send if call.stream else None)
        watches = self._watches.setdefault(call.call, set())
        watches.add(watch)
        try:
            if not call.session:
                return await self._generate_free(call, watch)
            if self._sessions is None:
                return GenerateAnswer(refusal=Refusal.ENDED, detail=f"this run has no session {call.session[:128]!r}")
            return await self._sessions.generate(call, watch, author)
        except Refused as error:
            return error.answer
        except (ConfigError, RowError) as error:
            return refused_call(error)
        finally:
            watches.discard(watch)
            if not watches:
                self._watches.pop(call.call, None)

    async def _generate_free(self, call: GenerateCall, watch: CallWatch) -> GenerateAnswer:
        """Answer a call without a session.

        Raises:
            Refused: no answer can be generated.
            ConfigError, RowError: a medium cannot be used, or the grammar.
        """
        media = self._media
        if media is None or not (call.messages or media.has_placeholders(call.tokens)):
            return await self._generate_read(call, None, watch)
        # Files of a row's media go with its step; this row is in no table, and its files go with its answer.
        row = RowId(next(self._serials), 0, self._folder)
        try:
            shown = await media.admit(row, (), call.messages)
            read = await media.read((), 0, call.tokens, shown.behind(0), row)
            return await self._generate_read(replace(call, tokens=read.tokens), read.media, watch)
        finally:
            self._context.table.store.remove_later(f"{row.kind}/{row.step}")

    async def _generate_read(self, call: GenerateCall, media: PromptMedia | None, watch: CallWatch) -> GenerateAnswer:
        if call.counts:
            return GenerateAnswer(prompt=call.tokens, call=call.call)
        request = replace(self.request(call), media=media)
        if call.grammar:
            await asyncio.to_thread(self._policy.prepare, call.grammar)
        generation = await self.ask(request, call.call, call.seconds, watch)
        if generation.finish_reason is FinishReason.ERROR:
            detail = "no token continues the answer in the form that was asked for; simplify the schema"
            raise Refused(Refusal.INVALID, detail, call.call)
        return self.answer(request.tokens, generation, call.call)

    def request(self, call: GenerateCall) -> GenerationRequest:
        """Return the request of a call without a session; raises Refused."""
        settings = self._context.config.rollout
        room = self._room - len(call.tokens)
        if not len(call.tokens) or room < 1:
            detail = (
                f"the prompt has {len(call.tokens)} tokens; the model's context of {self._room} "
                "leaves no room for an answer; shorten the conversation"
            )
            raise Refused(Refusal.TOO_LONG if room < 1 else Refusal.INVALID, detail)
        if int(call.tokens.min()) < 0 or int(call.tokens.max()) >= self._tokenizer.size:
            raise Refused(Refusal.INVALID, f"the vocabulary has {self._tokenizer.size} tokens; one is not in it")
        # The texts of rollout.stop could end a form in its middle.
        stops = partial(stops_of, self._tokenizer) if call.grammar else self._stops
        try:
            stop_ids, stop_strings = stops([*call.stop, *call.ends])
        except ConfigError as error:
            raise Refused(Refusal.INVALID, str(error).replace("rollout.stop", "stop")) from error
        if unknown := [token for token in call.stop_ids if token >= self._tokenizer.size]:
            detail = f"stop token {unknown[0]} is not in the vocabulary of {self._tokenizer.size} tokens"
            raise Refused(Refusal.INVALID, detail)
        greedy = call.temperature == 0
        temperature = settings.temperature if call.temperature is None else call.temperature
        return GenerationRequest(
            tokens=call.tokens,
            seed=call.seed,
            samples=1,
            temperature=GREEDY_TEMPERATURE if greedy else temperature,
            top_p=settings.top_p if call.top_p is None else call.top_p,
            max_tokens=min(call.max_tokens or settings.max_tokens, room),
            stop_ids=stop_ids.union(call.stop_ids),
            greedy_samples=int(greedy),
            stop_strings=stop_strings,
            # The bits of a deterministic run must not depend on what an engine has kept.
            session="" if self._context.config.run.deterministic else call.affinity,
            grammar=call.grammar,
        )

    async def ask(
        self, request: GenerationRequest, call: str, seconds: float, watch: CallWatch | None = None
    ) -> Generation:
        """Generate a request in the engine's running batch; raises Refused if there is no answer.

        After `seconds` nobody waits for the answer, as when `watch` says that the client has left: the request then
        leaves the queue or the batch.
        """
        watch = watch or CallWatch()
        if self._policy.service_waiting >= MAX_WAITING:
            raise Refused(Refusal.BUSY, f"{MAX_WAITING} requests wait for the engine; try again")
        pending = self._policy.generate(replace(request, watch=watch))
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watch.on_cancel(lambda: None if left.done() else left.set_result(None))
        answer = asyncio.wrap_future(pending)
        sending = asyncio.ensure_future(watch.send_pieces(request.tokens))
        try:
            both: list[asyncio.Future[Any]] = [answer, left]
            await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()[0]
            slow = f"the engine did not finish the request within {seconds:g} s; try again, or raise the time"
            raise Refused(Refusal.FAILED, LEFT if left.done() else slow, call)
        except RelaxError as error:
            raise Refused(Refusal.FAILED, str(error)[:500], call) from error
        finally:
            sending.cancel()
            watch.cancel()
            answer.cancel()

    def answer(self, prompt: NDArray[Any], generation: Generation, call: str) -> GenerateAnswer:
        """Return what a client gets of an answer to `prompt`, `[len] int32`."""
        versions = generation.versions
        return GenerateAnswer(
            prompt=prompt,
            tokens=generation.tokens,
            logprobs=generation.logprobs,
            versions=versions,
            finish_reason=str(generation.finish_reason),
            fingerprint=self.fingerprint(int(versions[-1]) if len(versions) else -1),
            call=call,
        )

    def fingerprint(self, version: int) -> str:
        """Return the fingerprint of weights; empty if it is not known."""
        return self._fingerprints.get(version, "")

    def metrics(self) -> dict[str, float]:
        """Return the calls answered, under way, and cancelled because their client had left."""
        return {"calls": self.answered, "calls_running": len(self._watches), "calls_cancelled": self.cancelled}

    def close(self) -> None:
        """Stop answering. Called in the role's thread; the connection is closed behind it."""
        if self._media is not None:
            self._media.close()
        for task in list(self._tasks):
            self._connection.loop.call_soon_threadsafe(task.cancel)


def refused_call(error: ConfigError | RowError) -> GenerateAnswer:
    """Return the answer to a call that template, tokenizer, media or grammar refused."""
    refusals: dict[type[Exception], Refusal] = {TooLongError: Refusal.TOO_LONG, SlowRowError: Refusal.BUSY}
    return GenerateAnswer(refusal=refusals.get(type(error), Refusal.INVALID), detail=str(error)[:500])


class Refused(Exception):  # noqa: N818 an answer, not an error of the program
    """A request that no answer can be generated for; `answer` says why."""

    def __init__(self, refusal: Refusal, detail: str, call: str = "") -> None:
        super().__init__(detail)
        self.answer = GenerateAnswer(refusal=refusal, detail=detail, call=call)
