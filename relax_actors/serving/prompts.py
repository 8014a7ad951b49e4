"""From what a client asks to the prompt that the model reads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from relax_actors.errors import SlowRowError, TooLongError
from relax_actors.messages.generate import GenerateCall, Refusal
from relax_actors.serving.ask import Ask
from relax_actors.serving.errors import ApiError, refused
from relax_actors.serving.policy import Policy
from relax_actors.sessions.dialogue import Dialogue
from relax_actors.sessions.message_media import shows_media

PREPARE_SECONDS = 10.0
"""Time to render and tokenize a conversation."""


class Prompts:
    """Makes the prompts of requests, each within `seconds`.

    The actors of the policy prepare media and know the tokens of sessions.
    """

    def __init__(self, policy: Policy, dialogue: Dialogue, seconds: float) -> None:
        self._policy, self._dialogue, self._seconds = policy, dialogue, seconds

    async def tokens(self, ask: Ask, *, asks: bool = True) -> NDArray[np.int32]:
        """Return the tokens of a prompt, `[len] int32`, with one placeholder for each medium.

        With `asks` the beginning of an answer follows the messages.

        Raises:
            ApiError: it has no tokens, or ids that the vocabulary lacks.
            RowError: the template or the tokenizer refuses it.
        """
        tokenizer = self._dialogue.tokenizer
        if isinstance(ask.prompt, list):
            size = tokenizer.size
            if bad := [token for token in ask.prompt if not 0 <= token < size]:
                msg = f"token {bad[0]} is not in the vocabulary of {size} tokens"
                raise ApiError(400, msg, "invalid_request")
            tokens = np.array(ask.prompt, np.int32)
        else:
            work = asyncio.to_thread(self._rendered, ask, asks=asks)
            try:
                tokens = await asyncio.wait_for(work, PREPARE_SECONDS)
            except TimeoutError as error:
                msg = f"the conversation was not tokenized within {PREPARE_SECONDS:g} s; shorten it"
                raise ApiError(400, msg, "too_slow") from error
            except TooLongError as error:
                raise refused(Refusal.TOO_LONG, str(error)) from error
            except SlowRowError as error:  # other texts are being tokenized; later it may succeed
                raise refused(Refusal.BUSY, str(error)) from error
        if not len(tokens):
            raise ApiError(400, "the prompt has no tokens; write one", "invalid_request")
        return tokens

    def _rendered(self, ask: Ask, *, asks: bool) -> NDArray[np.int32]:
        if isinstance(ask.prompt, str):
            return self._dialogue.tokenizer.encode_any(ask.prompt)
        return self._dialogue.prompt(ask.messages, ask.tools, ask.settings, asks=asks)

    async def free(self, ask: Ask, *, asks: bool = True) -> dict[str, Any]:
        """Return a call's fields without a session: tokens, and messages with media; see `tokens`."""
        fields: dict[str, Any] = {"tokens": await self.tokens(ask, asks=asks)}
        return fields | {"messages": ask.messages} if shows_media(ask.messages) else fields

    async def in_session(self, ask: Ask, session: str, player: str) -> dict[str, Any]:
        """Return the fields of a call that belongs to a session, whose actor renders and tokenizes.

        Raises:
            ApiError: there is no prompt, or it has ids that the vocabulary lacks.
        """
        fields: dict[str, Any] = {"session": session, "player": player, "n": ask.n}
        if ask.prompt is None:
            return fields | {"messages": ask.messages, "tools": ask.tools, "settings": ask.settings}
        if ask.prompt and isinstance(ask.prompt, str):
            return fields | {"text": ask.prompt}
        return fields | {"tokens": await self.tokens(ask)}

    async def read(
        self,
        ask: Ask,
        session: str,
        player: str = "",
        settings: Mapping[str, Any] | None = None,
        *,
        asks: bool = True,
    ) -> NDArray[np.int32]:
        """Return the tokens of a prompt as the model reads them, media included; see `tokens`.

        `settings` are further variables of the chat template.

        Raises:
            ApiError: as by `tokens`, or a medium cannot be read; RowError: as by `tokens`.
        """
        ask = replace(ask, settings=ask.settings | dict(settings or {}))
        if not shows_media(ask.messages):
            return await self.tokens(ask, asks=asks)
        given = await (self.in_session(ask, session, player) if session and asks else self.free(ask, asks=asks))
        call = GenerateCall(uuid4().hex, counts=True, affinity=session, seconds=self._seconds, **given)
        answer = await self._policy.generate(call)
        if answer.refusal:
            raise refused(answer.refusal, answer.detail)
        return answer.prompt
