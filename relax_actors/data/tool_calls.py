"""Tool calls in the text of a model's answer: the formats that model families are trained with, parsed and written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MAX_CALLS = 128
"""Most calls of one answer; the rest of the answer is one malformed call."""
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?\[ARGS\]")


class ToolFormat(StrEnum):
    """How a family of models writes tool calls."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3, SmolLM3."""
    QWEN_XML = "qwen_xml"
    """`<tool_call><function=...><parameter=...>...</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5."""
    LLAMA_JSON = "llama_json"
    """`{"name": ..., "parameters": {...}}` as the whole answer, several separated by `;`: Llama 3.1 and later."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]<name>[ARGS]{...}`: Mistral."""


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
    """A call of a tool."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Text that begins as a tool call but is none, and why; `error` is written for the model that wrote it."""

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
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template teaches; None if it knows no tools."""
    if "<function=" in template:
        return ToolFormat.QWEN_XML
    if "<tool_call>" in template:
        return ToolFormat.HERMES
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    return ToolFormat.LLAMA_JSON if "ipython" in template or "<|python_tag|>" in template else None


def split_reasoning(text: str, *, thinks: bool | None = None) -> tuple[str, str]:
    """Split an answer into its reasoning and the rest.

    Args:
        text: the answer.
        thinks: whether the prompt has opened the reasoning; None if the caller does not know.
    """
    opened = bool(thinks) or text.lstrip().startswith("<think>")
    before, found, after = text.partition("</think>")
    if not found:
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
    content, found = "", []
    for part in _PARSERS[tool_format](rest, _types(tools)):
        if isinstance(part, str):
            content += part
        else:
            found.append(part)
    calls = tuple(part for part in found if isinstance(part, ToolCall))
    return ParsedAnswer(content.strip(), reasoning, calls, tuple(p for p in found if isinstance(p, MalformedCall)))


def write_calls(calls: Sequence[ToolCall], tool_format: ToolFormat) -> str:
    """Write calls as a model of the family does, e.g. for supervised examples.

    Raises:
        ValueError: a name or an argument cannot be written in this format.
    """
    if not calls:
        return ""
    if tool_format is ToolFormat.QWEN_XML:
        return "\n".join(map(_write_xml, calls))
    arguments = "parameters" if tool_format is ToolFormat.LLAMA_JSON else "arguments"
    texts = [_dump({"name": call.name, arguments: call.arguments}) for call in calls]
    if tool_format is ToolFormat.HERMES:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return "; ".join(texts) if tool_format is ToolFormat.LLAMA_JSON else f"[TOOL_CALLS][{', '.join(texts)}]"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _write_xml(call: ToolCall) -> str:
    lines = [f"<tool_call>\n<function={call.name}>"]
    for name, value in call.arguments.items():
        text = value if isinstance(value, str) else _dump(value)
        if any(tag in text for tag in ("</parameter>", "</function>", "</tool_call>")):
            msg = f"argument {name!r} of {call.name} contains a tag of the tool call, which this format cannot write"
            raise ValueError(msg)
        lines.append(f"<parameter={name}>\n{text}\n</parameter>")
    return "\n".join([*lines, "</function>\n</tool_call>"])


def _types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the types of the parameters of each tool; tools that are malformed have none."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping) and isinstance(function.get("name"), str):
            found[function["name"]] = {
                str(name): schema.get("type") if isinstance(schema, Mapping) else None
                for name, schema in properties.items()
            }
    return found


_Parts = Iterator[str | ToolCall | MalformedCall]


def _loads(text: str, at: int = 0) -> tuple[Any, int]:
    """Decode the JSON value that begins at a position; return it and its end.

    Raises:
        ValueError: there is none.
    """

    def refuse(name: str) -> Any:
        msg = f"{name} is not JSON"
        raise ValueError(msg)

    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        found: tuple[Any, int] = json.JSONDecoder(parse_constant=refuse).raw_decode(text, at)
    except RecursionError as error:
        msg = "it is nested too deeply"
        raise ValueError(msg) from error
    return found


def _call_of(value: Any, text: str, tool_format: ToolFormat) -> ToolCall | MalformedCall:
    """Return the call that a decoded JSON object names."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return _malformed(text, 'it has no "name"', tool_format)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments, _ = _loads(arguments)
        except ValueError:
            return _malformed(text, "its arguments are a text, not an object", tool_format)
    if not isinstance(arguments, dict):
        return _malformed(text, "its arguments are not an object", tool_format)
    return ToolCall(name, arguments)


def _malformed(text: str, why: str, tool_format: ToolFormat) -> MalformedCall:
    shown = text.strip()[:200]
    return MalformedCall(text, f"the tool call {shown!r} cannot be made: {why}; write {EXAMPLES[tool_format]}")


def _describe(error: ValueError) -> str:
    where = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
    text = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return f"it is not valid JSON ({text}{where})"


def _tagged(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the text before the first `<tool_call>`, then that behind each; and whether it follows one."""
    before, *bodies = text.split("<tool_call>", MAX_CALLS)
    yield False, before
    yield from ((True, body) for body in bodies)


def _hermes(text: str, types: dict[str, dict[str, Any]]) -> _Parts:
    del types
    at, count = 0, 0
    while (start := text.find("<tool_call>", at)) >= 0:
        yield text[at:start]
        count += 1
        begin = start + len("<tool_call>")
        # Arguments may contain the closing tag, so the JSON value is read first.
        try:
            if count > MAX_CALLS:
                yield _malformed(text[start:], f"more than {MAX_CALLS} calls in one answer", ToolFormat.HERMES)
                return
            value, stop = _loads(text, begin)
            rest = text[stop:].lstrip()
            if not rest.startswith("</tool_call>"):
                stop, why = _end_of(text, stop), "</tool_call> does not follow its object"
                yield _malformed(text[start:stop], why, ToolFormat.HERMES)
            else:
                stop = text.index("</tool_call>", stop) + len("</tool_call>")
                yield _call_of(value, text[start:stop], ToolFormat.HERMES)
        except ValueError as error:
            stop = _end_of(text, begin)
            if isinstance(error, json.JSONDecodeError):
                error = json.JSONDecodeError(error.msg, text[begin:], max(0, error.pos - begin))
            yield _malformed(text[start:stop], _describe(error), ToolFormat.HERMES)
        at = stop
    yield text[at:]


def _end_of(text: str, begin: int) -> int:
    """Return the end of a call that begins here: behind its closing tag, else at the next call or the end."""
    ends = [found for tag in ("</tool_call>", "<tool_call>") if (found := text.find(tag, begin)) >= 0]
    if not ends:
        return len(text)
    end = min(ends)
    return end + len("</tool_call>") if text.startswith("</tool_call>", end) else end


def _qwen_xml(text: str, types: dict[str, dict[str, Any]]) -> _Parts:
    for is_call, body in _tagged(text):
        inside, closed, behind = body.partition("</tool_call>") if is_call else ("", "", body)
        if is_call:
            whole = f"<tool_call>{inside}{closed}"
            found = _FUNCTION.fullmatch(inside) if closed else None
            if found is None:
                why = "it is not one <function=...> closed by </function> and </tool_call>"
                yield _malformed(whole, why, ToolFormat.QWEN_XML)
            else:
                yield _xml_call(found[1].strip(), found[2], types, whole)
        yield behind


def _xml_call(name: str, body: str, types: dict[str, dict[str, Any]], text: str) -> ToolCall | MalformedCall:
    known, arguments = types.get(name, {}), {}
    if leftover := _PARAMETER.sub("", body).strip():
        return _malformed(text, f"{leftover[:60]!r} is outside of its parameters", ToolFormat.QWEN_XML)
    for key, raw in _PARAMETER.findall(body):
        value = raw.removeprefix("\n").removesuffix("\n")
        if known.get(key, "string") == "string":
            arguments[key] = value
            continue
        try:
            arguments[key], end = _loads(value)
            if value[end:].strip():
                return _malformed(text, f"parameter {key!r} is not one JSON value", ToolFormat.QWEN_XML)
        except ValueError as error:
            return _malformed(text, f"parameter {key!r}: {_describe(error)}", ToolFormat.QWEN_XML)
    return ToolCall(name, arguments)


def _llama_json(text: str, types: dict[str, dict[str, Any]]) -> _Parts:
    del types
    before, tagged, body = text.partition("<|python_tag|>")
    if not tagged:
        before, body = "", text
    is_call = bool(tagged) or (body.lstrip().startswith("{") and '"name"' in body and _has_arguments(body))
    yield before if is_call else text
    at = 0
    while is_call and body[at:].strip():
        try:
            value, end = _loads(body, at)
        except ValueError as error:
            yield _malformed(body[at:], _describe(error), ToolFormat.LLAMA_JSON)
            return
        yield _call_of(value, body[at:end], ToolFormat.LLAMA_JSON)
        rest = body[end:].lstrip()
        if rest and not rest.startswith(";"):
            yield _malformed(rest, "text follows a call; separate calls by ';'", ToolFormat.LLAMA_JSON)
            return
        at = body.index(";", end) + 1 if rest else len(body)


def _has_arguments(text: str) -> bool:
    return '"parameters"' in text or '"arguments"' in text


def _mistral(text: str, types: dict[str, dict[str, Any]]) -> _Parts:
    del types
    before, *bodies = text.split("[TOOL_CALLS]", MAX_CALLS)
    yield before
    for body in bodies:
        named = _NAMED.match(body)
        try:
            value, end = _loads(body, named.end() if named else 0)
        except ValueError as error:
            yield _malformed(body, _describe(error), ToolFormat.MISTRAL)
            continue
        values = [{"name": named[1], "arguments": value}] if named else value if isinstance(value, list) else [value]
        for one in values:
            yield _call_of(one, body[:end], ToolFormat.MISTRAL)
        yield body[end:]


_PARSERS = {
    ToolFormat.HERMES: _hermes,
    ToolFormat.QWEN_XML: _qwen_xml,
    ToolFormat.LLAMA_JSON: _llama_json,
    ToolFormat.MISTRAL: _mistral,
}
