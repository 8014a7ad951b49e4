"""Tokens of observations: by the chat template of the model, or as plain text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.renderer import Extension, Message, Renderer
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.data.tool_call import ToolFormat, call_ids, format_of
from relax_actors.data.tool_calls import parse_answer
from relax_actors.errors import RowError
from relax_actors.media.family import Family

NO_MARKERS: Mapping[str, str] = MappingProxyType({})


class PlainConversation:
    """Conversation of a model without chat template: the texts of messages, concatenated.

    All methods raise RowError for messages with parts that the model does not read; `markers` are the texts that stand
    for a medium of each kind that it does.
    """

    needs_stop, offers_tools = False, False

    def __init__(self, tokenizer: Tokenizer, markers: Mapping[str, str] = NO_MARKERS) -> None:
        self._tokenizer, self._markers = tokenizer, markers

    def prompt(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Encode the texts, with the special tokens that the model adds to every text."""
        return self._tokenizer.encode_any(text_of(messages, self._markers))

    def extend(self, history: Sequence[Message], answer: NDArray[Any], new: Sequence[Message]) -> Extension:
        """Encode the texts of the new messages alone."""
        del history, answer
        return Extension(self._tokenizer.encode_any(text_of(new, self._markers), special=False), is_faithful=True)

    def text(self, tokens: NDArray[Any]) -> str:
        """Decode without special tokens."""
        return self._tokenizer.decode(tokens)


class ChatConversation:
    """Conversation by the model's chat template; raises RowError if it refuses messages.

    Args:
        tokenizer: of the model.
        tools: JSON schemas of functions that the model may call.
        kinds: kinds of media that the model takes.
        branches: whether a new sequence may begin where the template rewrites the conversation.

    Attributes:
        needs_stop: whether observations follow only an answer that ended by itself, not at a limit.
        offers_tools: whether the prompt describes tools; it is then rendered here, and the data's tokens are not used.

    Raises:
        ConfigError: the template cannot be extended turn by turn.
    """

    needs_stop = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Message] = (),
        kinds: Collection[str] = (),
        *,
        branches: bool = True,
    ) -> None:
        self._tokenizer, self._kinds, self._branches = tokenizer, kinds, branches
        self._renderer = Renderer(tokenizer, tools)
        self._structures = bool(tools) and format_of(tokenizer.chat_template) is ToolFormat.MISTRAL
        self.offers_tools = bool(tools)

    def prompt(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Return the ids of a whole conversation, up to the place where the next answer begins."""
        check_parts(messages, self._kinds)
        return self._renderer.prompt(self._structured(messages))

    def extend(self, history: Sequence[Message], answer: NDArray[Any], new: Sequence[Message]) -> Extension:
        """Return the ids of messages that follow the tokens of an answer; see `Renderer.extend`.

        Raises:
            RowError: also if the template rewrites the conversation, and may not.
        """
        check_parts(new, self._kinds)
        extension = self._renderer.extend(self._structured(history), answer, new)
        if not extension.is_faithful and not self._branches:
            msg = (
                f"the chat template does not continue the tokens of the conversation: {extension.change}; use a "
                'template that keeps what it wrote, or set environment.on_rewrite = "branch"'
            )
            raise RowError(msg)
        return extension

    def _structured(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages with calls as the template wants them.

        Mistral's templates refuse two answers in a row, and do not count those with `tool_calls`, which results must
        follow. Those of other families write the text of a call as it was sampled.
        """
        if not self._structures:
            return messages
        structured: list[Message] = []
        for n, message in enumerate(messages):
            results = list(takewhile(lambda later: later.get("role") == "tool", messages[n + 1 :]))
            content = str(message.get("content") or "") if message.get("role") == "assistant" and results else ""
            if not (calls := parse_answer(content, ToolFormat.MISTRAL).calls):
                structured.append(message)
                continue
            names = [str(result.get("tool_call_id")) for result in results]
            names += call_ids(calls, f"{n} {content}")[len(names) :]
            written = [
                {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for name, call in zip(names, calls, strict=False)
            ]
            structured.append({"role": "assistant", "content": "", "tool_calls": written})
        return structured

    def text(self, tokens: NDArray[Any]) -> str:
        """Decode with special tokens, such as those of tool calls, but without the stop token."""
        kept = [int(t) for t in tokens if int(t) not in self._tokenizer.stop_ids]
        return str(self._tokenizer.inner.decode(kept, skip_special_tokens=False))


Conversation: TypeAlias = PlainConversation | ChatConversation
"""Renders the messages of an episode."""


def conversation_of(
    tokenizer: Tokenizer,
    *,
    chat: bool,
    tools: Sequence[Message] = (),
    family: Family | None = None,
    branches: bool = True,
) -> Conversation:
    """Return the conversation of a model, with its family if it reads media; may raise."""
    kinds = () if family is None else family.kinds
    if chat:
        return ChatConversation(tokenizer, tools, kinds, branches=branches)
    markers = {} if family is None else {kind: family.marker(kind, tokenizer.inner) for kind in kinds}
    return PlainConversation(tokenizer, markers)


def text_of(messages: Sequence[Message], markers: Mapping[str, str] = NO_MARKERS) -> str:
    """Return the concatenated texts of messages; `markers` stand for media."""
    check_parts(messages, markers)
    contents = [message.get("content") or "" for message in messages]
    parts = [part for content in contents for part in ([content] if isinstance(content, str) else content)]
    return "".join(
        part if isinstance(part, str) else markers[part["type"]] if part["type"] in markers else str(part["text"])
        for part in parts
    )


def check_parts(messages: Sequence[Message], kinds: Collection[str] = ()) -> None:
    """Check that messages hold text and media of these kinds; raises RowError otherwise."""
    for message in messages:
        content = message.get("content")
        for part in () if isinstance(content, str) else content or ():
            kind = "text" if isinstance(part, str) else part.get("type", "no type")
            if kind not in kinds and (kind != "text" or not (isinstance(part, str) or "text" in part)):
                reads = "text" if not kinds else f"text, {', '.join(kinds)}"
                msg = f"a message holds a part of type {kind!r}, but the model reads {reads} alone"
                raise RowError(msg)
