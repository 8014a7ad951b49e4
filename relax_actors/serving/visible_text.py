"""What of an answer that is being generated will surely be shown, whatever tokens follow.

Invariant: what is shown of a beginning of an answer is a beginning of what is shown of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_actors.data.tool_call import ToolFormat

OPEN, CLOSE = "<think>", "</think>"
_MARKS = {
    ToolFormat.HERMES: "<tool_call>",
    ToolFormat.QWEN_XML: "<tool_call>",
    ToolFormat.MISTRAL: "[TOOL_CALLS]",
    ToolFormat.LLAMA_JSON: "<|python_tag|>",
}


def visible(text: str, tool_format: ToolFormat | None, *, thinks: bool) -> tuple[str, str]:
    """Return the reasoning and the content that a text will show for certain; see `parse_answer`.

    Tool calls, and all that follows the first, are held back: they are taken apart when the answer is complete.

    Args:
        text: the answer so far.
        tool_format: format of its calls; None if there are none.
        thinks: whether the prompt has opened the reasoning.
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
