"""Answers under way: their tokens so far, and what of them the client has not been sent yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from relax_actors.data.tool_call import ToolFormat
from relax_actors.messages.generate import GeneratePiece
from relax_actors.serving.completion import Completed
from relax_actors.serving.errors import ApiError

Shown: TypeAlias = Callable[[GeneratePiece], tuple[str, str]]
"""Returns the reasoning and the content of an answer so far that surely stay, given its prompt and all its tokens."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one choice.

    Attributes:
        index: number of the choice.
        reasoning: further reasoning.
        content: further text.
        tokens: further token ids.
        logprobs: their log-probs.
    """

    index: int
    reasoning: str
    content: str
    tokens: Sequence[int]
    logprobs: Sequence[float]


class Writer(Protocol):
    """Writes the answers to a request in a protocol: as one body, or as events of a stream."""

    is_plain: bool
    """Whether an answer is text alone, which is not taken apart into reasoning, content and calls."""

    def whole(self, answers: Sequence[Completed]) -> dict[str, Any]:
        """Return the body with all answers."""

    def begin(self, call: str, prompt_length: int) -> bytes:
        """Return the first events."""

    def delta(self, delta: Delta) -> bytes:
        """Return the events of new text."""

    def end(self, answers: Sequence[Completed]) -> bytes:
        """Return the last events: calls of tools, reasons, usage."""

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""


class LiveChoice:
    """One answer that is being generated."""

    def __init__(self, index: int, call: str, news: asyncio.Event) -> None:
        self.call, self._index, self._news = call, index, news
        self.prompt_length = 0
        self._prompt: GeneratePiece | None = None
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._sent_tokens = 0
        self._sent = ("", "")
        self._is_other = False

    def add(self, piece: GeneratePiece) -> None:
        """Take a piece. One of another attempt at the answer repeats what is known."""
        if len(piece.prompt):
            self._prompt, self.prompt_length = piece, len(piece.prompt)
        known, new = len(self._tokens) - piece.start, piece.tokens.tolist()
        self._is_other |= known < 0 or new[:known] != self._tokens[piece.start : piece.start + len(new)][:known]
        self._tokens += new[max(0, known) :]
        self._logprobs += piece.logprobs.tolist()[max(0, known) :]
        self._news.set()

    def delta(self, shown: Shown) -> Delta | None:
        """Return the new part, or None; raises ApiError if a restarted answer differs."""
        if self._is_other:
            raise _restarted()
        if self._prompt is None or self._sent_tokens == len(self._tokens):
            return None
        tokens = np.array(self._tokens, np.int32)
        now = shown(GeneratePiece(0, self._prompt.prompt, tokens, np.array(self._logprobs, np.float32)))
        # A tokenizer whose text of a beginning is no beginning of the text shows nothing new for now.
        if not all(text.startswith(sent) for text, sent in zip(now, self._sent, strict=True)):
            now = self._sent
        return self._new(now, self._tokens, self._logprobs)

    def rest(self, answer: Completed, text: tuple[str, str]) -> Delta:
        """Return the rest of a complete answer; raises ApiError if it differs from what was sent."""
        tokens = answer.answer.tokens.tolist()
        begins_so = all(text[i].startswith(self._sent[i]) for i in range(2))
        if self._is_other or tokens[: self._sent_tokens] != self._tokens[: self._sent_tokens] or not begins_so:
            raise _restarted()
        return self._new(text, tokens, answer.answer.logprobs.tolist())

    def _new(self, now: tuple[str, str], tokens: list[int], logprobs: list[float]) -> Delta:
        (sent_reasoning, sent_content), start = self._sent, self._sent_tokens
        self._sent, self._sent_tokens = now, len(tokens)
        reasoning, content = now[0][len(sent_reasoning) :], now[1][len(sent_content) :]
        return Delta(self._index, reasoning, content, tokens[start:], logprobs[start:])


class LiveStream:
    """The answers to one request."""

    def __init__(
        self, choices: Sequence[LiveChoice], news: asyncio.Event, work: asyncio.Future[list[Completed]]
    ) -> None:
        self._choices, self._news, self.work = choices, news, work
        self._has_begun = False

    async def wait(self, seconds: float) -> bool:
        """Wait for new tokens or the end, this long at most; return whether there is something."""
        news: asyncio.Future[Any] = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait([self.work, news], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        return self._news.is_set() or self.work.done()

    def events(self, writer: Writer, shown: Shown) -> bytes:
        """Return the events of the new part; raises ApiError if a restarted answer differs."""
        self._news.clear()
        events = []
        for choice in self._choices:
            if (delta := choice.delta(shown)) is not None:
                events += [self._begin(writer, self._choices[0].call, choice.prompt_length), writer.delta(delta)]
        return b"".join(events)

    def end(self, writer: Writer, answers: Sequence[Completed], texts: Sequence[tuple[str, str]]) -> bytes:
        """Return the events of all that is left.

        Args:
            writer: writes the events.
            answers: the answers.
            texts: reasoning and content of each.

        Raises:
            ApiError: an answer differs from what was sent of it.
        """
        events = [self._begin(writer, answers[0].call, len(answers[0].answer.prompt))]
        for choice, one, text in zip(self._choices, answers, texts, strict=True):
            events.append(writer.delta(choice.rest(one, text)))
        return b"".join([*events, writer.end(answers)])

    def _begin(self, writer: Writer, call: str, prompt_length: int) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return writer.begin(call, prompt_length)


def _restarted() -> ApiError:
    msg = "the answer was begun anew by another actor and differs from what was sent; send the request again"
    return ApiError(503, msg, "restarted", 1.0)


OPEN, CLOSE = "<think>", "</think>"
_MARKS = {
    ToolFormat.HERMES: "<tool_call>",
    ToolFormat.QWEN_XML: "<tool_call>",
    ToolFormat.MISTRAL: "[TOOL_CALLS]",
    ToolFormat.LLAMA_JSON: "<|python_tag|>",
}


def visible(text: str, tool_format: ToolFormat | None, *, thinks: bool) -> tuple[str, str]:
    """Return the reasoning and content that cannot change any more; see `parse_answer`.

    Invariant: what is shown of a beginning of an answer is a beginning of what is shown of the whole.

    Tool calls, and all that follows the first, are held back: they are taken apart when the answer is complete.
    """
    text = text.rstrip("\ufffd")  # the rest of the character may follow
    begun = text.lstrip()
    if len(begun) < len(OPEN) and OPEN.startswith(begun):
        return "", ""
    if not thinks and not begun.startswith(OPEN):
        return "", _content(text, tool_format)
    before, closed, after = text.partition(CLOSE)
    before = before if closed else _before(before, CLOSE)
    reasoning = before.strip().removeprefix(OPEN).strip()
    return reasoning, _content(after, tool_format) if closed else ""


def _content(text: str, tool_format: ToolFormat | None) -> str:
    if tool_format is not None:
        if tool_format is ToolFormat.LLAMA_JSON and text.lstrip().startswith("{"):
            return ""
        text = _before(text, _MARKS[tool_format])
    return text.strip()


def before_marks(text: str, marks: Sequence[str]) -> str:
    """Return the text before the first of some marks, or before what may become one."""
    return min((_before(text, mark) for mark in marks), key=len, default=text)


def _before(text: str, mark: str) -> str:
    """Return the text before a mark, or before what may become one."""
    if (at := text.find(mark)) >= 0:
        return text[:at]
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return text[:-length]
    return text
