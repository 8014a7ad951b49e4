"""Tool calls in the text of a model's answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_actors.data.tool_call import MalformedCall, ParsedAnswer, ToolCall, ToolFormat
from relax_actors.data.tool_call_parsers import PARSERS


def split_reasoning(text: str, *, thinks: bool | None = None) -> tuple[str, str]:
    """Split an answer into its reasoning and the rest.

    Args:
        text: the answer.
        thinks: whether the prompt has opened the reasoning; None if the caller does not know.
    """
    opened = bool(thinks) or text.lstrip().startswith("<think>")
    before, tag, after = text.partition("</think>")
    if not tag:
        return (before.strip().removeprefix("<think>").strip(), "") if opened else ("", text)
    if not opened and thinks is not None:
        return "", text
    if not opened and any(mark in before for mark in ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")):
        return "", text  # an argument of a call that contains the tag
    return before.strip().removeprefix("<think>").strip(), after


def parse_answer(
    text: str,
    tool_format: ToolFormat | None,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    thinks: bool | None = None,
) -> ParsedAnswer:
    """Take an answer apart; never raises.

    Args:
        text: the answer with its special tokens, without the stop token.
        tool_format: format of its calls; None leaves them in the content.
        tools: the tools that the model was offered, as `{"type": "function", "function": {...}}`; they give the types
            of arguments in a format that does not write types.
        thinks: whether the prompt has opened the reasoning; None if the caller does not know.
    """
    reasoning, rest = split_reasoning(text, thinks=thinks)
    if tool_format is None:
        return ParsedAnswer(rest.strip(), reasoning)
    content, all_calls = "", []
    for part in PARSERS[tool_format](rest, _types(tools)):
        if isinstance(part, str):
            content += part
        else:
            all_calls.append(part)
    calls = tuple(part for part in all_calls if isinstance(part, ToolCall))
    return ParsedAnswer(content.strip(), reasoning, calls, tuple(p for p in all_calls if isinstance(p, MalformedCall)))


def _types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the types of the parameters of each tool; tools that are malformed have none."""
    types: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping) and isinstance(function.get("name"), str):
            types[function["name"]] = {
                str(name): schema.get("type") if isinstance(schema, Mapping) else None
                for name, schema in properties.items()
            }
    return types
