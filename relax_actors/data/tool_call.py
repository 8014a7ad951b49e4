"""A tool call in a model's answer, and the formats in which model families write it."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

CALL_ID_LENGTH = 9
CALL_ID = re.compile(rf"[A-Za-z0-9]{{{CALL_ID_LENGTH}}}")
"""Id of a tool call: what Mistral's templates demand, and others allow."""


class ToolFormat(StrEnum):
    """How a family of models writes tool calls."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""
    QWEN_XML = "qwen_xml"
    """`<tool_call><function=...><parameter=...>...</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5."""
    LLAMA_JSON = "llama_json"
    """`{"name": ..., "parameters": {...}}` as the whole answer, several separated by `;`: Llama 3.1 and later."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]<name>[ARGS]{...}`: Mistral."""


CLOSING = {ToolFormat.HERMES: "</tool_call>", ToolFormat.QWEN_XML: "</tool_call>"}
"""What ends a call, in the formats that have such a mark."""
EXAMPLES = {
    ToolFormat.HERMES: '<tool_call>\n{"name": <name>, "arguments": {<name>: <value>}}\n</tool_call>',
    ToolFormat.QWEN_XML: (
        "<tool_call>\n<function=<name>>\n<parameter=<name>>\n<value>\n</parameter>\n</function>\n</tool_call>"
    ),
    ToolFormat.LLAMA_JSON: '{"name": <name>, "parameters": {<name>: <value>}}',
    ToolFormat.MISTRAL: '[TOOL_CALLS][{"name": <name>, "arguments": {<name>: <value>}}]',
}
"""A call in each format, for the answer to a malformed one."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `id` is what the model wrote as its id, empty if nothing."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Text that begins as a tool call but is none; `error` is for its model."""

    text: str
    error: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer of a model, taken apart.

    Attributes:
        content: text outside of reasoning and calls, stripped.
        reasoning: text before `</think>`, without its tags, stripped; empty if there is none.
        calls: well-formed calls, in order.
        malformed: calls that cannot be made, in order.
        stop: stop string that ended the answer, which is no part of the content; empty if none did.
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    stop: str = ""


def call_ids(calls: Sequence[ToolCall], answer: str) -> list[str]:
    """Return an id for each call: the model's own if they are unique.

    Args:
        calls: the calls.
        answer: identifies the answer in its conversation; the ids follow from it. Its text alone does not: a model may
            write the same call in two turns.
    """
    written = [call.id for call in calls]
    return [name if name and written.count(name) == 1 else _call_id(answer, n) for n, name in enumerate(written)]


def _call_id(answer: str, n: int) -> str:
    number = int.from_bytes(hashlib.sha256(f"{answer}.{n}".encode()).digest()[:16])
    alphabet, call_id = string.ascii_letters + string.digits, ""
    while len(call_id) < CALL_ID_LENGTH:
        number, digit = divmod(number, len(alphabet))
        call_id += alphabet[digit]
    return call_id


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template teaches; None if it knows no tools."""
    if "<function=" in template:
        return ToolFormat.QWEN_XML
    if "<tool_call>" in template:
        return ToolFormat.HERMES
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    return ToolFormat.LLAMA_JSON if "ipython" in template or "<|python_tag|>" in template else None
