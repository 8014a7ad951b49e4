"""Answers of the policy, taken apart; whole answers of tokens alone, and server-sent events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from relax_actors.data.tool_call import ParsedAnswer
from relax_actors.messages import FinishReason
from relax_actors.messages.generate import GenerateAnswer


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


def token_response(completed: Completed) -> dict[str, Any]:
    """Return the body of `/inference/v1/generate`, with tokens written `token_id:<id>`."""
    answer = completed.answer
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
        "request_id": completed.call,
        "choices": [choice],
        "prompt_token_ids": answer.prompt.tolist(),
        "system_fingerprint": completed.fingerprint,
    }


def event(body: dict[str, Any], name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n".encode()
