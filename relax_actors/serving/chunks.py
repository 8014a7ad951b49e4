"""OpenAI's chat and text completions, whole or as streams of chunks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.serving.ask import Ask
from relax_actors.serving.completion import Completed, event
from relax_actors.serving.errors import ApiError
from relax_actors.serving.live import Delta
from relax_actors.sessions.dialogue import answer_message

DONE = b"data: [DONE]\n\n"


class _CompletionWriter:
    """What chat and text completions share."""

    prefix, kind, chunk_kind = "", "", ""
    is_plain = False

    def __init__(self, ask: Ask, tokenizer: Tokenizer, model: str) -> None:
        self._ask, self._tokenizer, self._model = ask, tokenizer, model
        self._head: dict[str, Any] = {}

    def _fields(self, call: str, kind: str) -> dict[str, Any]:
        """Return the fields that a body and all chunks of a stream share."""
        model = self._ask.model or self._model
        return {"id": f"{self.prefix}-{call}", "object": kind, "created": int(time.time()), "model": model}

    def _totals(self, answers: Sequence[Completed]) -> dict[str, Any]:
        """Return fingerprint, usage and, if requested, the token ids of the prompt."""
        prompt, completion = answers[0].answer.prompt, sum(len(one.answer.tokens) for one in answers)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": completion,
            "total_tokens": len(prompt) + completion,
        }
        totals = {"system_fingerprint": answers[0].fingerprint, "usage": usage}
        return totals | ({"prompt_token_ids": prompt.tolist()} if self._ask.token_ids else {})

    def whole(self, answers: Sequence[Completed]) -> dict[str, Any]:
        """Return the body of a completion."""
        choices = []
        for index, one in enumerate(answers):
            tokens, logprobs = one.answer.tokens.tolist(), one.answer.logprobs.tolist()
            delta = Delta(index, "", one.text, tokens, logprobs)
            choices.append(self._choice(delta, self._content(one), one.finish_reason))
        return self._fields(answers[0].call, self.kind) | self._totals(answers) | {"choices": choices}

    def _content(self, one: Completed) -> dict[str, Any]:
        """Return the content of a whole choice."""
        raise NotImplementedError

    def _choice(self, delta: Delta, content: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        """Return a choice with its tokens and log-probs, if the client wants them."""
        logprobs = self._logprobs(delta) if self._ask.logprobs else None
        choice = {"index": delta.index, **content, "finish_reason": finish_reason, "logprobs": logprobs}
        return choice | ({"token_ids": list(delta.tokens)} if self._ask.token_ids else {})

    def _entries(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the log-prob of each token."""
        entries = []
        for token, logprob in zip(delta.tokens, delta.logprobs, strict=True):
            raw = self._tokenizer.token_bytes(token)
            text = raw.decode(errors="replace")
            entries.append({"token": text, "logprob": logprob, "bytes": list(raw), "top_logprobs": []})
        return entries

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        """Return the log-probs of a choice."""
        raise NotImplementedError

    def begin(self, call: str, prompt_length: int) -> bytes:
        """Fix the fields that all chunks share."""
        del prompt_length
        self._head = self._fields(call, self.chunk_kind)
        return b""

    def _chunk(self, *choices: dict[str, Any], **fields: Any) -> bytes:
        return event(self._head | {"choices": list(choices)} | fields)

    def _delta(self, delta: Delta, content: Mapping[str, Any], *, has_news: bool) -> bytes:
        """Return a chunk with new content, tokens and log-probs, as far as the client wants them."""
        wants_tokens = delta.tokens and (self._ask.logprobs or self._ask.token_ids)
        return self._chunk(self._choice(delta, content)) if has_news or wants_tokens else b""

    def _finish(self, answers: Sequence[Completed], content: Mapping[str, Any]) -> bytes:
        """Return the last chunks: finish reasons and usage."""
        last = [
            {"index": index, **content, "finish_reason": one.finish_reason, "logprobs": None}
            for index, one in enumerate(answers)
        ]
        totals = self._totals(answers)
        usage = totals.pop("usage")
        return self._chunk(*last, **totals) + (self._chunk(usage=usage) if self._ask.usage_in_stream else b"") + DONE

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return event(error.openai())


class ChatWriter(_CompletionWriter):
    """Writes a chat completion; implements `live.Writer`."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, ask: Ask, tokenizer: Tokenizer, model: str) -> None:
        super().__init__(ask, tokenizer, model)
        self._begun: set[int] = set()

    def _content(self, one: Completed) -> dict[str, Any]:
        return {"message": answer_message(one.parsed, one.call)}

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return {"content": self._entries(delta), "refusal": None}

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
        return self._delta(delta, {"delta": given}, has_news=bool(given))

    def end(self, answers: Sequence[Completed]) -> bytes:
        """Return chunks with tool calls, finish reasons and usage."""
        events = []
        for index, one in enumerate(answers):
            if calls := answer_message(one.parsed, one.call).get("tool_calls"):
                delta = {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}
                events.append(self._chunk({"index": index, "delta": delta, "finish_reason": None, "logprobs": None}))
        return b"".join(events) + self._finish(answers, {"delta": {}})


class TextWriter(_CompletionWriter):
    """Writes a text completion; implements `live.Writer`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    is_plain = True

    def __init__(self, ask: Ask, tokenizer: Tokenizer, model: str) -> None:
        super().__init__(ask, tokenizer, model)
        self._offsets: dict[int, int] = {}

    def _content(self, one: Completed) -> dict[str, Any]:
        return {"text": one.text}

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        entries, offset, offsets = self._entries(delta), self._offsets.get(delta.index, 0), []
        for entry in entries:
            offsets.append(offset)
            offset += len(entry["token"])
        self._offsets[delta.index] = offset
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def delta(self, delta: Delta) -> bytes:
        """Return a chunk with new text, tokens and log-probs."""
        return self._delta(delta, {"text": delta.content}, has_news=bool(delta.content))

    def end(self, answers: Sequence[Completed]) -> bytes:
        """Return chunks with finish reasons and usage."""
        return self._finish(answers, {"text": ""})
