"""Form of an answer as a grammar: JSON of a schema, or tool calls of the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.data.tool_call import CALL_ID, ToolFormat
from relax_actors.errors import RowError

_WHITE_SPACE = {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": " ?|\\n {0,40}"}}
"""A space, or a line break and an indentation: without a limit, a model can fill its answer with white space."""
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY = "/(.|\\n)*/"
_NAME = re.compile(r"[\w.-]+")
_OBJECT_KEYWORDS = frozenset(
    [
        "$defs",
        "$schema",
        "additionalProperties",
        "definitions",
        "description",
        "properties",
        "required",
        "title",
        "type",
    ]
)
_STRING_KEYWORDS = frozenset(["default", "description", "enum", "examples", "title", "type"])
Schema = Mapping[str, Any]


class Thinking(StrEnum):
    """How the reasoning of an answer begins."""

    NONE = "none"
    """It has none: the model has no such mark, or the prompt has closed it."""
    POSSIBLE = "possible"
    """The answer may begin with `<think>`."""
    OPENED = "opened"
    """The prompt ends with `<think>`."""


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must be. With neither a schema nor forced calls, it may be anything.

    Attributes:
        schema: JSON schema of the content; None for any text.
        forces_call: whether the answer must be tool calls.
        tool: the tool that must be called, once; empty for any.
        calls_once: whether there may be one call alone.
    """

    schema: Schema | None = None
    forces_call: bool = False
    tool: str = ""
    calls_once: bool = False

    def __bool__(self) -> bool:
        return self.schema is not None or self.forces_call


def grammar_of(
    form: Form, tools: Sequence[Schema], tokenizer: Tokenizer, family: ToolFormat | None, thinking: Thinking
) -> str:
    """Return the grammar of the answers in a form; see `relax_actors.data.grammar`.

    An answer whose form has a schema is JSON, or calls of the offered tools.

    Args:
        form: the form, which needs a grammar.
        tools: the tools that the model is offered.
        tokenizer: of the model.
        family: format of its calls; None if it has none.
        thinking: whether reasoning precedes the answer.

    Raises:
        RowError: the form has no grammar for this model.
    """
    lark = _Lark(tokenizer)
    bodies = []
    if form.schema is not None and not form.forces_call:
        bodies.append(lark.json(form.schema))
    functions = [tool["function"] for tool in tools if form.tool in ("", tool["function"]["name"])]
    if functions and family is not None:
        bodies.append(_calls(lark, family, functions, once=form.calls_once or bool(form.tool)))
    body = lark.rule(" | ".join(bodies))
    if thinking is Thinking.NONE:
        return lark.text(body)
    reasoning = lark.rule(lark.until("</think>") + " /\\n{0,2}/")
    if thinking is Thinking.POSSIBLE:
        reasoning = f"({lark.mark('<think>')} {reasoning})?"
    return lark.text(f"{reasoning} {body}")


class _Lark:
    """Rules of a grammar in Lark's syntax; marks that are tokens stay tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._rules: list[str] = []

    def text(self, start: str) -> str:
        """Return the whole grammar."""
        return "\n".join([f"start: {start}", *self._rules])

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule; return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def json(self, schema: Schema) -> str:
        """Return a rule for JSON; raises RowError if the tokenizer cannot spell its signs."""
        if schema.get("type") == "object":
            self.tokenizer.encode('{"":}', special=False)
        return self.rule(f"%json {json.dumps({**schema, **_WHITE_SPACE})}")

    def mark(self, text: str) -> str:
        """Return a text that may be one token."""
        token = self.tokenizer.inner.token_to_id(text)
        return literal(text) if token is None else f"<[{token}]>"

    def until(self, end: str) -> str:
        """Return any text up to the first `end`, included."""
        mark = self.mark(end)
        if mark.startswith("<["):
            return f"{self.rule(_ANY)} {mark}"
        return self.rule(f"/(.|\\n)*{_escaped(end)}/", "[lazy]")


def literal(text: str) -> str:
    """Return a text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def _calls(lark: _Lark, family: ToolFormat, functions: Iterable[Schema], *, once: bool) -> str:
    """Return a rule for calls of some functions; parsers of `tool_call_parsers` read them."""
    template = lark.tokenizer.chat_template
    begin, between, end = "", "", ""
    if family is ToolFormat.QWEN_XML:
        call, between = _xml_call, literal("\n")
    elif family is ToolFormat.HERMES:
        call, between = _hermes_call, literal("\n")
    elif family is ToolFormat.LLAMA_JSON:
        call, between = _llama_call, literal("; ")
    elif "[ARGS]" in template:
        call = _mistral_call
    else:
        call, between = _json_call, literal(", ")
        begin, end = f"{lark.mark('[TOOL_CALLS]')} {literal('[')}", literal("]")
    one = lark.rule(" | ".join(call(lark, function) for function in functions))
    more = "" if once else f"({between} {one})*"
    return lark.rule(f"{begin} {one} {more} {end}")


def _json_call(lark: _Lark, function: Schema, arguments: str = "arguments") -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    begin = literal(f'{{"name": {name}, "{arguments}": ')
    return lark.rule(f"{begin} {lark.json(_parameters(function))} {literal('}')}")


def _llama_call(lark: _Lark, function: Schema) -> str:
    return _json_call(lark, function, "parameters")


def _hermes_call(lark: _Lark, function: Schema) -> str:
    begin, line, end = lark.mark("<tool_call>"), literal("\n"), lark.mark("</tool_call>")
    return lark.rule(f"{begin} {line} {_json_call(lark, function)} {line} {end}")


def _mistral_call(lark: _Lark, function: Schema) -> str:
    name, call_id = _plain_name(function), ""
    if "[CALL_ID]" in lark.tokenizer.chat_template:
        call_id = f"{lark.mark('[CALL_ID]')} /{CALL_ID.pattern}/"
    arguments = lark.json(_parameters(function))
    return lark.rule(f"{lark.mark('[TOOL_CALLS]')} {literal(name)} {call_id} {lark.mark('[ARGS]')} {arguments}")


def _xml_call(lark: _Lark, function: Schema) -> str:
    name, schema = _plain_name(function), _parameters(function)
    _check_keywords(schema, _OBJECT_KEYWORDS, f"the parameters of tool {name!r}")
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if missing := [key for key in required if key not in properties]:
        msg = f"tool {name!r} requires {missing[0]!r:.80}, which its properties lack; add its schema"
        raise RowError(msg)
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts, line = [], "\n"
    for key, value in properties.items():
        inner = _xml_value(lark, value, definitions, f"parameter {key!r:.80} of tool {name!r}")
        part = lark.rule(f"{literal(f'<parameter={key}>' + line)} {inner}")
        parts.append(part if key in required else f"{part}?")
    begin, end = literal(f"\n<function={name}>\n"), literal("</function>\n")
    marks = lark.mark("<tool_call>"), lark.mark("</tool_call>")
    return lark.rule(f"{marks[0]} {begin} {' '.join(parts)} {end} {marks[1]}")


def _xml_value(lark: _Lark, schema: Any, definitions: Schema, place: str) -> str:
    """Return a rule for a value and its closing tag: a string as it is, anything else as JSON."""
    end = "\n</parameter>\n"
    if not isinstance(schema, Mapping):
        schema = {}
    if schema.get("type") != "string":
        return f"{lark.json({**schema, **definitions})} {literal(end)}"
    _check_keywords(schema, _STRING_KEYWORDS, place)
    if "enum" in schema:
        return f"({' | '.join(literal(str(value)) for value in schema['enum'])}) {literal(end)}"
    return lark.until(end)


def _check_keywords(schema: Schema, known: frozenset[str], place: str) -> None:
    if unknown := sorted(schema.keys() - known):
        msg = (
            f"{place} use {unknown[0]!r}, to which the calls of this model cannot be held, since it writes text "
            "between tags instead of JSON; leave it out, or use tool_choice auto"
        )
        raise RowError(msg)


def _plain_name(function: Schema) -> str:
    name = str(function["name"])
    if not _NAME.fullmatch(name):
        msg = f"tool {name[:80]!r} cannot be called by this model; name it with letters, digits, '_', '.' and '-'"
        raise RowError(msg)
    return name


def _parameters(function: Schema) -> Schema:
    """Return the JSON schema of a function's arguments; raises RowError for no object."""
    schema = function.get("parameters") or _NO_ARGUMENTS
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        msg = f"the parameters of tool {str(function['name'])[:80]!r} are no JSON schema of type object; correct them"
        raise RowError(msg)
    return {"type": "object", **schema}
