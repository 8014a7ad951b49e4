"""Write docs/config.md from the configuration's own schema: `python docs/make_config.py`."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from relax_actors.config import schema
from relax_actors.config.simulate import Distribution

TARGET = Path(__file__).parent / "config.md"
PACKAGE = "relax_actors.config"


def field_notes(model: type[BaseModel]) -> dict[str, str]:
    """The string under each field of a class, as written in its source."""
    body = ast.parse(inspect.getsource(model)).body[0]
    notes: dict[str, str] = {}
    name = ""
    for node in getattr(body, "body", []):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            notes[name] = " ".join(str(node.value.value).split())
            name = ""
        else:
            name = ""
    return notes


def inherited_notes(model: type[BaseModel]) -> dict[str, str]:
    """Notes of a class and its bases."""
    notes: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base.__module__.startswith(PACKAGE):
            notes |= field_notes(base)
    return notes


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one."""
    options = [annotation, *getattr(annotation, "__args__", ())]
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def shown_type(annotation: Any) -> str:  # noqa: PLR0911 one a kind of type
    """A type as a reader of TOML understands it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return shown_type(inner[0])
    if origin is Literal:
        return " or ".join(f"`{value!r}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(shown_type(part) for part in inner if part is not NoneType)
    if origin in (list, tuple):
        return f"list of {shown_type(inner[0])}"
    if origin is dict:
        return f"table of {shown_type(inner[1])}"
    if annotation is Distribution:
        return "number or distribution"
    names = {str: "string", int: "integer", float: "number", bool: "true or false", Path: "path"}
    return names.get(annotation, "anything")


def lines_of(model: type[BaseModel], path: str) -> list[str]:
    """The section's table, and those of the sections in it."""
    notes = inherited_notes(model)
    intro = " ".join((model.__doc__ or "").split())
    rows, inner = [], []
    for name, info in model.model_fields.items():
        section = inner_model(info.annotation)
        if section is Distribution:
            section = None
        if section is not None and section is not schema.RoleSection:
            inner.append((section, f"{path}.{name}" if path else name))
            continue
        if section is schema.RoleSection:
            inner.append((section, "roles.<name>"))
            continue
        default = "required" if info.default is PydanticUndefined and info.default_factory is None else info.default
        if info.default_factory is not None:
            default = info.default_factory()
        if isinstance(default, Distribution):
            default = default.constant
        text = "" if default is None else f"`{default}`" if default != "required" else "required"
        rows.append(f"| `{name}` | {shown_type(info.annotation)} | {text} | {notes.get(name, '')} |")
    lines = []
    if rows:
        text = intro.removeprefix(f"[{path}]").lstrip(": ")
        lines = [f"## [{path}]", "", *([text[:1].upper() + text[1:], ""] if text else [])]
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    for section, where in inner:
        lines += lines_of(section, where)
    return lines


def page() -> str:
    """The whole page."""
    head = [
        "# Configuration",
        "",
        "Made by `python docs/make_config.py` from `relax_actors/config`. Paths are relative to the file, `run.folder`",
        "and those on the command line to the working directory; every key can be set there as `section.key=value`.",
        "Unknown keys are refused.",
        "",
    ]
    return "\n".join([*head, *lines_of(schema.Config, ""), *lines_of(Distribution, "distribution")]).rstrip() + "\n"


if __name__ == "__main__":
    TARGET.write_text(page())
