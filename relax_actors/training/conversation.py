"""Tokens of the observations of an episode: by the chat template of the model, or as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.renderer import Extension, Message, Renderer
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError


class Conversation(Protocol):
    """Renders the messages of an episode.

    Attributes:
        needs_stop: whether observations follow only an answer that ended with a stop token.
    """

    needs_stop: bool

    def prompt(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Return the ids of a whole conversation, `[len] int32`, up to the place where the next answer begins.

        Raises:
            RowError: the messages cannot be rendered.
        """

    def extend(self, history: Sequence[Message], answer: str, new: Sequence[Message]) -> Extension:
        """Return the ids of messages that follow an answer; see `Renderer.extend`.

        Raises:
            RowError: the messages cannot be rendered.
        """

    def text(self, tokens: NDArray[Any]) -> str:
        """Return what the model wrote, as the environment reads it."""


class PlainConversation:
    """Conversation of a model without chat template: the texts of the messages, one behind the other.

    Args:
        tokenizer: of the model.
    """

    needs_stop = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Encode the texts, with the special tokens that the model adds to every text."""
        return self._tokenizer.encode(text_of(messages))

    def extend(self, history: Sequence[Message], answer: str, new: Sequence[Message]) -> Extension:
        """Encode the texts of the new messages alone."""
        del history, answer
        return Extension(self._tokenizer.encode(text_of(new), special=False), is_faithful=True)

    def text(self, tokens: NDArray[Any]) -> str:
        """Decode without special tokens."""
        return self._tokenizer.decode(tokens)


class ChatConversation:
    """Conversation by the chat template of the model.

    Args:
        tokenizer: of the model.

    Raises:
        ConfigError: the template cannot be extended turn by turn.
    """

    needs_stop = True

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Message] = ()) -> None:
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer, tools)
        self.prompt = self._renderer.prompt
        self.extend = self._renderer.extend

    def text(self, tokens: NDArray[Any]) -> str:
        """Decode with special tokens, such as those of tool calls, but without the stop token."""
        kept = [int(t) for t in tokens if int(t) not in self._tokenizer.stop_ids]
        return str(self._tokenizer.inner.decode(kept, skip_special_tokens=False))


def conversation_of(tokenizer: Tokenizer, *, chat: bool, tools: Sequence[Message] = ()) -> Conversation:
    """Return the conversation of a model.

    Raises:
        ConfigError: as `ChatConversation`.
    """
    return ChatConversation(tokenizer, tools) if chat else PlainConversation(tokenizer)


def text_of(messages: Sequence[Message]) -> str:
    """Return the texts of messages, one behind the other.

    Raises:
        RowError: a message holds an image, a video or a sound.
    """
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        for part in [content] if isinstance(content, str) else content or ():
            text = part if isinstance(part, str) else part.get("text") if part.get("type") == "text" else None
            if text is None:
                msg = f"an observation holds {part.get('type', 'no text')!r}, which a model of plain text cannot read"
                raise RowError(msg)
            texts.append(str(text))
    return "".join(texts)
