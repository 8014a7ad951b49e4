"""What a prompt source yields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt with what its reward needs.

    `prompt` is a text, or a chat as a list of `{"role": ..., "content": ...}` messages. `metadata` is plain data
    (what msgpack can carry).
    """

    prompt: str | list[dict[str, str]]
    answer: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
