"""Requests of agents as requests of the engine, and what the engine generates as turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.config import Config
from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.messages import FinishReason, Turn
from relax_actors.messages.generate import GenerateAnswer, GenerateCall, Refusal
from relax_actors.runtime.seeds import derive_seed
from relax_actors.sessions.call_watch import CallWatch
from relax_actors.sessions.continuations import Continuations, Prompts, conversation_keys, prompt_key
from relax_actors.sessions.dialogue import Dialogue, answer_message
from relax_actors.sessions.forest import Continuation, Forest
from relax_actors.sessions.message_media import MessageMedia, Shown
from relax_actors.sessions.service import GenerationService, Refused
from relax_actors.sessions.session_book import Session


class AgentTurns:
    """Makes turns of one run with [agent].

    `room` is the largest number of tokens of a sequence; `media` is None for a model that reads text only.
    """

    def __init__(
        self,
        config: Config,
        dialogue: Dialogue,
        service: GenerationService,
        room: int,
        media: MessageMedia | None = None,
    ) -> None:
        self._rollout, self._service, self._room = config.rollout, service, room
        self._dialogue, self._media = dialogue, media
        must_continue = config.agent is not None and config.agent.on_rewrite == "error"
        self._continuations = Continuations(dialogue, must_continue=must_continue)
        self._prompts = Prompts(dialogue)

    async def shown(self, session: Session, call: GenerateCall) -> tuple[GenerateCall, Shown | None]:
        """Return a call with media named by hash, and the media; None for a text model.

        Raises:
            RowError: a medium may not be used, or cannot be read.
        """
        if self._media is None:
            return call, None
        shown = await self._media.admit(session.row, session.media, call.messages)
        return replace(call, messages=shown.messages), shown

    async def plan(self, session: Session, call: GenerateCall, shown: Shown | None = None) -> Continuation:
        """Return what a request continues.

        Raises:
            RowError, ConfigError: the template refuses the messages, the text cannot be tokenized, or a medium cannot
                be decoded or does not fit its placeholder.
            StoreError: media of earlier turns are lost.
            Refused: the conversation does not continue the tokens of the session, and must.
        """
        forest = session.forest
        # In a thread of its own: templates take milliseconds.
        plan = await asyncio.to_thread(self._find, forest, call)
        if self._media is None or shown is None:
            return plan
        path = [forest.turns[number] for number in forest.path(plan.parent)]
        sources = shown.behind(len(shown.messages) - len(plan.new)) if call.messages else []
        before = len(forest.tokens(plan.parent))
        read = await self._media.read(path, before, plan.observed, sources, session.row)
        observed = [] if read.observed is None else [read.observed]
        return replace(plan, observed=read.tokens, media=read.media, shown=observed)

    def _find(self, forest: Forest, call: GenerateCall) -> Continuation:
        if call.messages:
            return self._continuations.plan(forest, call, _keys(call))
        return self._prompts.plan(forest, call)

    def requests(self, session: Session, call: GenerateCall, plan: Continuation) -> list[GenerationRequest]:
        """Return the requests of a call, one an answer; the row decides sampling and seeds.

        Raises:
            Refused: no room is left, or the answers cannot end behind their first tool call.
        """
        tokens = prompt_of(session.forest, plan)
        settings, room = self._rollout, self._room - len(tokens)
        if room < 1:
            detail = (
                f"the conversation has {len(tokens)} tokens, and a sequence of this run at most {self._room}; shorten "
                "the messages, or end the session"
            )
            raise Refused(Refusal.TOO_LONG, detail)
        if call.ends and settings.min_tokens:
            detail = (
                f"parallel_tool_calls = false is not supported in this run: rollout.min_tokens = {settings.min_tokens} "
                "continues a shorter answer behind its first tool call; leave it out"
            )
            raise Refused(Refusal.INVALID, detail)
        own = session.sampling
        limit = settings.max_tokens if own is None else own.max_tokens
        most = min(call.max_tokens or limit, limit, room)
        drawn = (None, None) if own is None else (0.0, None) if session.greedy else (own.temperature, own.top_p)
        temperature, top_p = drawn
        call = replace(
            call, tokens=tokens, max_tokens=most, temperature=temperature, top_p=top_p, affinity=call.session
        )
        request, first = self._service.request(call), len(session.forest.turns)
        return [
            replace(
                request,
                seed=derive_seed(session.seed, "turn", session.sample, number),
                media=plan.media,
                min_tokens=min(settings.min_tokens, most),
            )
            for number in range(first, first + call.n)
        ]

    async def generate(
        self, requests: Sequence[GenerationRequest], call: GenerateCall, watch: CallWatch
    ) -> list[Generation]:
        """Generate the answers to a call together; raises Refused, and ends all, if one fails."""
        watches = [watch] if len(requests) == 1 else [watch.of_choice(index) for index in range(len(requests))]
        answers = [
            asyncio.ensure_future(self._service.ask(request, call.call, call.seconds, own))
            for request, own in zip(requests, watches, strict=True)
        ]
        try:
            return await asyncio.gather(*answers)
        finally:
            for answer in answers:
                answer.cancel()

    def turns(
        self, call: GenerateCall, plan: Continuation, prompt: NDArray[Any], said: Sequence[Generation]
    ) -> list[Turn]:
        """Return the turns of the answers `said` to a call; `prompt`, `[len] int32`, was read."""
        before = len(prompt) - len(plan.observed)
        turns = []
        for index, answer in enumerate(said):
            name = f"{call.call}-{index}" if index else call.call
            if call.messages:
                parsed = self._dialogue.parse(prompt, answer.tokens, call.tools, call.stop)
                message = answer_message(parsed, name)
                state = _keys(replace(call, messages=[*call.messages, message]))[-1]
            else:
                message, state = self._prompts.answer(answer.tokens, call.stop), ""
            names = {"asked": asked_key(call), "state": state, "call": name, "player": call.player}
            turns.append(plan.turn(answer, before, message, **names))
        return turns

    def answer(self, forest: Forest, numbers: Sequence[int]) -> GenerateAnswer:
        """Return turns as the answers to one call."""
        turns = [forest.turns[number] for number in numbers]
        prompt = np.concatenate([forest.tokens(turns[0].parent), turns[0].observed]).astype(np.int32)
        first, *others = (
            self._service.answer(
                prompt,
                Generation(turn.tokens, turn.logprobs, turn.versions, FinishReason(turn.finish_reason)),
                turn.call,
            )
            for turn in turns
        )
        return replace(first, others=[one.first for one in others])


def prompt_of(forest: Forest, plan: Continuation) -> NDArray[Any]:
    """Return what the model reads, `[len] int32`."""
    tokens: NDArray[Any] = np.concatenate([forest.tokens(plan.parent), plan.observed]).astype(np.int32)
    return tokens


def asked_key(call: GenerateCall) -> str:
    """Return the key of a call's recorded answers: its content and the number of answers."""
    key = _keys(call)[-1] if call.messages else prompt_key(call.text or call.tokens.tolist(), call.player)
    return key if call.n == 1 else f"{key}.{call.n}"


def _keys(call: GenerateCall) -> list[str]:
    return conversation_keys(call.messages, call.tools, call.settings, call.player)
