"""Token ids of a conversation, without tokenizing sampled text again.

A conversation with a model is one growing sequence of token ids: the prompt, the sampled tokens of an answer up to its
stop token, the tokens of the messages that reply to it, the next answer, and so on. To decode the answers and to render
the whole conversation again would give other ids: merges over a border, reformatted tool calls, dropped whitespace.
`Renderer.extend` therefore gives only the ids that follow the sampled ones.

Characters of messages that the tokenizer cannot encode are spelled in another way (`Tokenizer.encode_any`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import ConfigError, RowError

Message: TypeAlias = dict[str, Any]
"""A chat message: `role`, `content`, and what else the template reads."""
_ANSWER = "Xq7Answer7qX"
"""Stands for a sampled answer in a rendered conversation: no template changes it, no message contains it."""
_PROBE = {"role": "user", "content": "one\ntwo"}
_HISTORIES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "question"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "other"}],
)


@dataclass(frozen=True, slots=True)
class Extension:
    """Tokens that follow a sampled answer.

    Attributes:
        token_ids: `[len] int32`, from behind the last sampled token to the place where the next answer begins. They
            begin with the stop token that the template writes, if the answer ended without one.
        is_faithful: whether the template renders the conversation as the tokens so far and these spell it. It does not
            where the template drops the reasoning of earlier answers, or the answer ended with another stop token.
        change: what the template changes, for errors; empty if nothing.
    """

    token_ids: NDArray[np.int32]
    is_faithful: bool
    change: str = ""


class Renderer:
    """Renders conversations by the chat template of a model.

    Construction proves on conversations of its own that what the template writes behind an answer depends on the new
    messages only, and begins with a stop token.

    Args:
        tokenizer: tokenizer of the model, with a chat template.
        tools: JSON schemas of functions that the model may call.
        settings: further variables of the template, e.g. `enable_thinking`.

    Raises:
        ConfigError: the tokenizer has no chat template, or the proof fails.
    """

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[Message] = (), settings: Mapping[str, Any] | None = None
    ) -> None:
        if not tokenizer.has_chat_template:
            msg = "the tokenizer has no chat template; add chat_template.jinja to the model folder"
            raise ConfigError(msg)
        self._tokenizer = tokenizer
        self._settings = {"tools": list(tools) or None, **(settings or {})}
        self._stops = sorted((tokenizer.token_bytes(i).decode() for i in tokenizer.stop_ids), key=len, reverse=True)
        self._prove()

    def prompt(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Return a conversation's ids up to the answer, `[len] int32`; raises RowError."""
        return self._tokenizer.encode_any(self._render(messages), special=False)

    def extend(self, history: Sequence[Message], answer: NDArray[Any], new: Sequence[Message]) -> Extension:
        """Return the tokens of messages that follow a sampled answer.

        Args:
            history: the messages before the answer.
            answer: `[len] int32`, the sampled tokens. An answer that ended at a stop string or a limit has no stop
                token; the result then begins with it. Without tokens, the result is what follows a stop token.
            new: messages that follow the answer.

        Raises:
            RowError: the template refuses the messages.
        """
        stop, bridge = self._behind_answer(_HISTORIES[0], new)
        ended = self._stop_of(answer) if len(answer) else stop
        added = self._tokenizer.encode_any(bridge if ended else stop + bridge, special=False)
        if ended and ended != stop:
            return Extension(
                added, is_faithful=False, change=f"it ends an answer with {stop!r}, the model with {ended!r}"
            )
        text = self._tokenizer.spell(answer)
        before = self._render(history)
        whole = self._render([*history, {"role": "assistant", "content": text}, *new])
        if not whole.startswith(before):
            return Extension(added, is_faithful=False, change="it rewrites the messages before the last answer")
        if not whole[len(before) :].endswith(stop + bridge):
            return Extension(added, is_faithful=False, change="it writes what follows the last answer in another way")
        # Whitespace around an answer is no difference: many templates trim it, some write a space before it.
        written = whole[len(before) : -len(stop + bridge)]
        if written.strip() != text.strip():
            shown = f"it writes the last answer as {written.strip()[:80]!r}, the model {text.strip()[:80]!r}"
            return Extension(added, is_faithful=False, change=shown)
        return Extension(added, is_faithful=True)

    def _stop_of(self, answer: NDArray[Any]) -> str:
        """Return the stop token that ends an answer; empty if none does."""
        last = int(answer[-1])
        return self._tokenizer.token_bytes(last).decode() if last in self._tokenizer.stop_ids else ""

    def _render(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.chat(list(messages), **self._settings)

    def _behind_answer(self, history: Sequence[Message], new: Sequence[Message]) -> tuple[str, str]:
        """Return the stop token behind an answer and the text after it.

        Raises:
            RowError: the template refuses the messages, or drops the answer.
            ConfigError: no stop token follows the answer.
        """
        text = self._render([*history, {"role": "assistant", "content": _ANSWER}, *new])
        _, mark, rest = text.partition(_ANSWER)
        if not mark or _ANSWER in rest:
            msg = f"the chat template writes an answer {text.count(_ANSWER)} times; it must write it once"
            raise RowError(msg)
        stop = next((stop for stop in self._stops if rest.startswith(stop)), None)
        if stop is None:
            msg = (
                f"the chat template writes {rest[:20]!r} behind an answer, which is none of the stop tokens "
                f"{', '.join(map(repr, self._stops)) or '(none)'}; correct eos_token_id in generation_config.json"
            )
            raise ConfigError(msg)
        return stop, rest[len(stop) :]

    def _prove(self) -> None:
        try:
            framings = [self._behind_answer(history, [_PROBE]) for history in _HISTORIES]
            for (_, one), (_, other) in pairwise(framings):
                if one != other:
                    msg = (
                        f"the chat template writes {one[:60]!r} behind an answer, but {other[:60]!r} in a longer "
                        "conversation, so that new messages cannot be added to sampled tokens; use another template"
                    )
                    raise ConfigError(msg)
            self._prove_tokens(*framings[0])
        except RowError as error:
            msg = f"a conversation of several turns cannot be rendered: {error}"
            raise ConfigError(msg) from error

    def _prove_tokens(self, stop: str, bridge: str) -> None:
        """Check that ids of an answer, its stop token and what follows are independent."""
        # The alphabet of a small model lacks some characters; those of messages are spelled in the same way.
        texts = [self._tokenizer.escapes.spell(text).text for text in ("two", stop, bridge)]
        parts = [self._tokenizer.encode(text, special=False) for text in texts]
        whole = self._tokenizer.encode("".join(texts), special=False)
        if not np.array_equal(np.concatenate(parts), whole):
            msg = (
                f"the tokenizer joins characters over the stop token {stop!r}; add it to added_tokens of "
                "tokenizer.json as a special token"
            )
            raise ConfigError(msg)
