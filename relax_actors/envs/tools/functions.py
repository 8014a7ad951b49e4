"""A Python function as a tool: its JSON schema, and calls with checked arguments."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pydantic

from relax_actors.envs.observation import EnvironmentFaultError
from relax_actors.errors import ConfigError

_ARGUMENT = re.compile(r"^\s+\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")
_SECTION = re.compile(r"^(\w+):\s*$")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class ToolError(Exception):
    """Failure of a tool call; the text is for the model that made it."""


class Tool:
    """A function that a model may call.

    Args:
        function: function or bound method with type hints; may be a coroutine function. Its docstring describes it, and
            the entries of the section `Args:` describe the arguments.
        name: name for the model; that of the function by default.

    Raises:
        ConfigError: an argument has no type hint, or one that no JSON schema describes.
    """

    def __init__(self, function: Callable[..., Any], name: str = "") -> None:
        self.function, self.name = function, name or function.__name__
        where = f"tool {self.name}"
        try:
            hints = typing.get_type_hints(function)
            parameters = inspect.signature(function).parameters.values()
        except (NameError, TypeError, ValueError) as error:
            msg = f"{where}: its signature cannot be read: {error}; write a function with type hints"
            raise ConfigError(msg) from error
        fields: dict[str, Any] = {}
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                msg = f"{where}: argument {parameter} cannot be given by name; write arguments with names"
                raise ConfigError(msg)
            if parameter.name not in hints:
                msg = f"{where}: argument {parameter.name!r} has no type hint; write `{parameter.name}: <type>`"
                raise ConfigError(msg)
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints[parameter.name], default)
        try:
            strict = pydantic.ConfigDict(extra="forbid")
            self._model = pydantic.create_model(self.name, __config__=strict, **fields)
            parameters_schema = self._model.model_json_schema()
        except (TypeError, ValueError, pydantic.PydanticUserError) as error:
            msg = f"{where}: its type hints have no JSON schema: {error}"
            raise ConfigError(msg) from error
        self.schema = _schema(self.name, inspect.getdoc(function) or "", parameters_schema)

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function.

        Raises:
            ToolError: the arguments do not fit, or the function raised; a `ToolError` of its own is kept as it is.
            EnvironmentFaultError: the function reports a failure that is not the model's.
        """
        try:
            checked = self._model(**arguments)
        except (pydantic.ValidationError, TypeError) as error:
            raise ToolError(self._explain(error)) from error
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        try:
            result = self.function(**values)
            return await result if inspect.isawaitable(result) else result
        except (ToolError, EnvironmentFaultError):
            raise
        except (Exception, SystemExit) as error:  # of `sys.exit`, which would end the session's process
            msg = f"{self.name} raised {type(error).__name__}: {error}"
            raise ToolError(msg) from error

    def _explain(self, error: pydantic.ValidationError | TypeError) -> str:
        if isinstance(error, TypeError):
            return f"{self.name}: {error}"
        known = ", ".join(self._model.model_fields) or "none"
        lines = []
        for problem in error.errors():
            where = ".".join(map(str, problem["loc"]))
            if problem["type"] == "extra_forbidden":
                lines.append(f"no argument {where!r}; arguments are {known}")
            elif problem["type"] == "missing":
                lines.append(f"argument {where!r} is missing")
            else:
                lines.append(f"argument {where!r}: {problem['msg']}, got {problem['input']!r:.80}")
        return f"{self.name}: {'; '.join(lines)}"


def tools_of(functions: Sequence[Callable[..., Any] | Tool]) -> dict[str, Tool]:
    """Return tools by name; raises ConfigError if two have one name, and as `Tool`."""
    tools: dict[str, Tool] = {}
    for function in functions:
        tool = function if isinstance(function, Tool) else Tool(function)
        if tool.name in tools:
            msg = f"two tools have the name {tool.name!r}; rename one"
            raise ConfigError(msg)
        tools[tool.name] = tool
    return tools


def content_of(result: Any) -> str | list[dict[str, Any]]:
    """Return a tool's result as the content of a message: a text, or a list of parts.

    Raises:
        ToolError: it has no text of its own, as a generator, whose text is an address in memory.
    """
    if isinstance(result, str):
        return utf8(result)
    if isinstance(result, list | tuple) and result and all(isinstance(p, Mapping) and "type" in p for p in result):
        return [dict(part) for part in result]
    try:
        return utf8(json.dumps(result, ensure_ascii=False, allow_nan=True, default=_text_of))
    except (TypeError, ValueError):
        return utf8(_text_of(result))


def utf8(text: str) -> str:
    """Return a text with `?` in place of surrogates, which UTF-8 has no bytes for."""
    return text.encode(errors="replace").decode()


def _text_of(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)  # the order of a set differs from one process to another
    text = str(value)
    if _ADDRESS.search(text):
        msg = (
            f"the tool returned a {type(value).__name__}, which has no text; let it return a text, a number, a list "
            "or a dict"
        )
        raise ToolError(msg)
    return text


def _schema(name: str, text: str, parameters: dict[str, Any]) -> dict[str, Any]:
    described = _arguments(text)
    properties = {
        key: {k: v for k, v in schema.items() if k != "title"}
        | ({"description": described[key]} if key in described and "description" not in schema else {})
        for key, schema in parameters.get("properties", {}).items()
    }
    kept = {key: value for key, value in parameters.items() if key in ("required", "$defs")}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": text.split("\n\n", 1)[0].replace("\n", " ").strip(),
            "parameters": {"type": "object", "properties": properties, **kept},
        },
    }


def _arguments(text: str) -> dict[str, str]:
    """Return the descriptions of arguments in a docstring's section `Args:`."""
    texts: dict[str, str] = {}
    section, last = "", ""
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section = heading[1]
        elif section == "Args" and (match := _ARGUMENT.match(line)) and not line.startswith(" " * 8):
            last = match[1]
            texts[last] = match[2].strip()
        elif section == "Args" and last and line.startswith(" " * 8):
            texts[last] += f" {line.strip()}"
    return texts
