"""Parsers of tool calls, one for each format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from relax_actors.data.tool_call import CALL_ID, EXAMPLES, MalformedCall, ToolCall, ToolFormat

MAX_CALLS = 128
"""Most calls of one answer; the rest of the answer is one malformed call."""
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]([\w-]*))?\[ARGS\]")
Parts = Iterator[str | ToolCall | MalformedCall]


def _loads(text: str, at: int = 0) -> tuple[Any, int]:
    """Decode the JSON value at a position; return it and its end; raises ValueError."""

    def refuse(name: str) -> Any:
        msg = f"{name} is not JSON"
        raise ValueError(msg)

    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        value: tuple[Any, int] = json.JSONDecoder(parse_constant=refuse).raw_decode(text, at)
    except RecursionError as error:
        msg = "it is nested too deeply"
        raise ValueError(msg) from error
    return value


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
    given = value.get("id", "")
    return ToolCall(name, arguments, given if isinstance(given, str) and CALL_ID.fullmatch(given) else "")


def _malformed(text: str, why: str, tool_format: ToolFormat) -> MalformedCall:
    shown = text.strip()[:200]
    return MalformedCall(text, f"the tool call {shown!r} cannot be made: {why}; write {EXAMPLES[tool_format]}")


def _describe(error: ValueError) -> str:
    where = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
    text = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return f"it is not valid JSON ({text}{where})"


def _tagged(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the text before the first `<tool_call>`, then behind each; and which it is."""
    before, *bodies = text.split("<tool_call>", MAX_CALLS)
    yield False, before
    yield from ((True, body) for body in bodies)


def _hermes(text: str, types: dict[str, dict[str, Any]]) -> Parts:
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
    """Return the end of a call: behind its closing tag, else at the next call or the end."""
    ends = [at for tag in ("</tool_call>", "<tool_call>") if (at := text.find(tag, begin)) >= 0]
    if not ends:
        return len(text)
    end = min(ends)
    return end + len("</tool_call>") if text.startswith("</tool_call>", end) else end


def _qwen_xml(text: str, types: dict[str, dict[str, Any]]) -> Parts:
    for is_call, body in _tagged(text):
        inside, closed, behind = body.partition("</tool_call>") if is_call else ("", "", body)
        if is_call:
            whole = f"<tool_call>{inside}{closed}"
            match = _FUNCTION.fullmatch(inside) if closed else None
            if match is None:
                why = "it is not one <function=...> closed by </function> and </tool_call>"
                yield _malformed(whole, why, ToolFormat.QWEN_XML)
            else:
                yield _xml_call(match[1].strip(), match[2], types, whole)
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


def _llama_json(text: str, types: dict[str, dict[str, Any]]) -> Parts:
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


def _mistral(text: str, types: dict[str, dict[str, Any]]) -> Parts:
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
        values = value if isinstance(value, list) else [value]
        if named:
            values = [{"name": named[1], "arguments": value, "id": named[2]}]
        for one in values:
            yield _call_of(one, body[:end], ToolFormat.MISTRAL)
        yield body[end:]


PARSERS = {
    ToolFormat.HERMES: _hermes,
    ToolFormat.QWEN_XML: _qwen_xml,
    ToolFormat.LLAMA_JSON: _llama_json,
    ToolFormat.MISTRAL: _mistral,
}
