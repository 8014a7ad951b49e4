"""Items of a data source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt, with the data that its reward needs.

    Attributes:
        prompt: a text, or a chat as a list of `{"role": ..., "content": ...}` messages.
        answer: reference answer; empty if there is none.
        metadata: plain data (types that msgpack encodes).
        origin: file and line, or source and number, for errors; set by the data source.
    """

    prompt: str | list[dict[str, str]]
    answer: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    origin: str = field(default="", compare=False, repr=False)
