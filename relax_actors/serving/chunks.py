"""OpenAI's chat and text completions as streams of chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.serving.ask import Ask
from relax_actors.serving.completion import Completed, entries_of, event, whole_body
from relax_actors.serving.errors import ApiError
from relax_actors.serving.live import Delta
from relax_actors.sessions.dialogue import answer_message

DONE = b"data: [DONE]\n\n"


class _ChunkWriter:
    """What the writers of chunks share.

    Args:
        ask: what the client asks for.
        tokenizer: tokenizer of the model.
        model: name of the model.
    """

    prefix, kind = "", ""
    is_plain = False

    def __init__(self, ask: Ask, tokenizer: Tokenizer, model: str) -> None:
        self._ask, self._tokenizer, self._model = ask, tokenizer, model
        self._head: dict[str, Any] = {}

    def begin(self, call: str, prompt_length: int) -> bytes:
        """Fix the fields that all chunks share."""
        del prompt_length
        self._head = {
            "id": f"{self.prefix}-{call}",
            "object": self.kind,
            "created": int(time.time()),
            "model": self._ask.model or self._model,
        }
        return b""

    def _chunk(self, *choices: dict[str, Any], **fields: Any) -> bytes:
        return event(self._head | {"choices": list(choices)} | fields)

    def _finish(self, found: Sequence[Completed], *choices: dict[str, Any]) -> bytes:
        """Return the last chunks."""
        whole = whole_body(self.kind, self.prefix, self._ask, found, self._model)
        fields = {key: whole[key] for key in ("system_fingerprint", "prompt_token_ids") if key in whole}
        usage = self._chunk(usage=whole["usage"]) if self._ask.usage_in_stream else b""
        return self._chunk(*choices, **fields) + usage + DONE

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return event(error.openai())


class ChatWriter(_ChunkWriter):
    """Writes a chat completion; implements `live.Writer`."""

    prefix, kind = "chatcmpl", "chat.completion.chunk"

    def __init__(self, ask: Ask, tokenizer: Tokenizer, model: str) -> None:
        super().__init__(ask, tokenizer, model)
        self._begun: set[int] = set()

    def delta(self, delta: Delta) -> bytes:
        """Return chunks with new reasoning and text, tokens and log-probs."""
        given: dict[str, Any] = {}
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            given = {"role": "assistant", "content": ""}
        if delta.reasoning:
            given["reasoning_content"] = delta.reasoning
        if delta.content:
            given["content"] = delta.content
        if not given and not (delta.tokens and (self._ask.logprobs or self._ask.token_ids)):
            return b""
        choice: dict[str, Any] = {"index": delta.index, "delta": given, "finish_reason": None, "logprobs": None}
        if self._ask.logprobs:
            entries = entries_of(delta.tokens, delta.logprobs, self._tokenizer)
            choice["logprobs"] = {"content": entries, "refusal": None}
        if self._ask.token_ids:
            choice["token_ids"] = list(delta.tokens)
        return self._chunk(choice)

    def end(self, found: Sequence[Completed]) -> bytes:
        """Return chunks with tool calls, finish reasons and usage."""
        events, last = [], []
        for index, one in enumerate(found):
            if calls := answer_message(one.parsed, one.call).get("tool_calls"):
                delta = {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}
                events.append(self._chunk({"index": index, "delta": delta, "finish_reason": None, "logprobs": None}))
            last.append({"index": index, "delta": {}, "finish_reason": one.finish_reason, "logprobs": None})
        return b"".join(events) + self._finish(found, *last)


class TextWriter(_ChunkWriter):
    """Writes a text completion; implements `live.Writer`."""

    prefix, kind = "cmpl", "text_completion"
    is_plain = True

    def __init__(self, ask: Ask, tokenizer: Tokenizer, model: str) -> None:
        super().__init__(ask, tokenizer, model)
        self._offsets: dict[int, int] = {}

    def delta(self, delta: Delta) -> bytes:
        """Return a chunk with new text, tokens and log-probs."""
        if not delta.content and not (delta.tokens and (self._ask.logprobs or self._ask.token_ids)):
            return b""
        choice: dict[str, Any] = {"index": delta.index, "text": delta.content, "finish_reason": None, "logprobs": None}
        if self._ask.logprobs:
            entries = entries_of(delta.tokens, delta.logprobs, self._tokenizer)
            offset, offsets = self._offsets.get(delta.index, 0), []
            for entry in entries:
                offsets.append(offset)
                offset += len(entry["token"])
            self._offsets[delta.index] = offset
            choice["logprobs"] = {
                "tokens": [entry["token"] for entry in entries],
                "token_logprobs": [entry["logprob"] for entry in entries],
                "top_logprobs": None,
                "text_offset": offsets,
            }
        if self._ask.token_ids:
            choice["token_ids"] = list(delta.tokens)
        return self._chunk(choice)

    def end(self, found: Sequence[Completed]) -> bytes:
        """Return chunks with finish reasons and usage."""
        last = [
            {"index": index, "text": "", "finish_reason": one.finish_reason, "logprobs": None}
            for index, one in enumerate(found)
        ]
        return self._finish(found, *last)
