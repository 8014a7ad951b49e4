"""Answers of the policy in the form of OpenAI's chat and text completions, whole."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.data.tool_call import ParsedAnswer
from relax_actors.messages import FinishReason
from relax_actors.messages.generate import GenerateAnswer
from relax_actors.serving.ask import Ask
from relax_actors.sessions.dialogue import answer_message


@dataclass(frozen=True, slots=True)
class Completed:
    """One answer of the policy, taken apart.

    Attributes:
        call: id of the request.
        answer: tokens, log-probs and versions.
        parsed: its text and tool calls.
        text: its text without special tokens.
    """

    call: str
    answer: GenerateAnswer
    parsed: ParsedAnswer
    text: str

    @property
    def fingerprint(self) -> str:
        """Version and fingerprint of the weights that sampled the last token."""
        version = int(self.answer.versions[-1]) if len(self.answer.versions) else -1
        return f"v{version}-{self.answer.fingerprint[:16]}"

    @property
    def finish_reason(self) -> str:
        """Why the answer ended, in OpenAI's words."""
        if self.parsed.calls:
            return "tool_calls"
        return "stop" if self.answer.finish_reason == FinishReason.STOP else "length"


def chat_response(ask: Ask, found: Sequence[Completed], tokenizer: Tokenizer, model: str) -> dict[str, Any]:
    """Return the body of a chat completion."""
    choices = []
    for index, one in enumerate(found):
        choice = {
            "index": index,
            "message": answer_message(one.parsed, one.call),
            "logprobs": {"content": logprob_entries(one, tokenizer), "refusal": None} if ask.logprobs else None,
            "finish_reason": one.finish_reason,
        }
        if ask.token_ids:
            choice["token_ids"] = one.answer.tokens.tolist()
        choices.append(choice)
    return whole_body("chat.completion", "chatcmpl", ask, found, model) | {"choices": choices}


def text_response(ask: Ask, found: Sequence[Completed], tokenizer: Tokenizer, model: str) -> dict[str, Any]:
    """Return the body of a text completion."""
    choices = []
    for index, one in enumerate(found):
        choice: dict[str, Any] = {
            "index": index,
            "text": one.text,
            "finish_reason": one.finish_reason,
            "logprobs": None,
        }
        if ask.logprobs:
            entries = logprob_entries(one, tokenizer)
            offsets = [0]
            for entry in entries:
                offsets.append(offsets[-1] + len(entry["token"]))
            choice["logprobs"] = {
                "tokens": [entry["token"] for entry in entries],
                "token_logprobs": [entry["logprob"] for entry in entries],
                "top_logprobs": None,
                "text_offset": offsets[:-1],
            }
        if ask.token_ids:
            choice["token_ids"] = one.answer.tokens.tolist()
        choices.append(choice)
    return whole_body("text_completion", "cmpl", ask, found, model) | {"choices": choices}


def token_response(found: Completed) -> dict[str, Any]:
    """Return the body of `/inference/v1/generate`; tokens are written `token_id:<id>`, as its clients demand."""
    answer = found.answer
    entries = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(answer.tokens.tolist(), answer.logprobs.tolist(), strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": answer.tokens.tolist(),
        "finish_reason": "stop" if answer.finish_reason == FinishReason.STOP else "length",
        "logprobs": {"content": entries},
    }
    return {
        "request_id": found.call,
        "choices": [choice],
        "prompt_token_ids": answer.prompt.tolist(),
        "system_fingerprint": found.fingerprint,
    }


def logprob_entries(found: Completed, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the log-prob of each token of an answer."""
    return entries_of(found.answer.tokens.tolist(), found.answer.logprobs.tolist(), tokenizer)


def entries_of(tokens: Sequence[int], logprobs: Sequence[float], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the log-prob of each token."""
    entries = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        raw = tokenizer.token_bytes(token)
        text = raw.decode(errors="replace")
        entries.append({"token": text, "logprob": logprob, "bytes": list(raw), "top_logprobs": []})
    return entries


def event(body: dict[str, Any], name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n".encode()


def whole_body(kind: str, prefix: str, ask: Ask, found: Sequence[Completed], model: str) -> dict[str, Any]:
    """Return the fields that all bodies have: the model, usage, and token ids of the prompt if asked for."""
    prompt, completion = len(found[0].answer.prompt), sum(len(one.answer.tokens) for one in found)
    body: dict[str, Any] = {
        "id": f"{prefix}-{found[0].call}",
        "object": kind,
        "created": int(time.time()),
        "model": ask.model or model,
        "system_fingerprint": found[0].fingerprint,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }
    if ask.token_ids:
        body["prompt_token_ids"] = found[0].answer.prompt.tolist()
    return body
