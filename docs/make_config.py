"""Write docs/config.md from the schema of the configuration: `python docs/make_config.py`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from relax_actors.algorithms.named_functions import readers
from relax_actors.config import Config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.sections import Named
from relax_actors.config.simulate import Distribution
from relax_actors.registry.catalog import ADVANTAGES, POLICY_LOSSES

TARGET = Path(__file__).parent / "config.md"
PACKAGE = "relax_actors.config"


def field_notes(model: type[BaseModel]) -> dict[str, str]:
    """Docstrings of the fields of a class: the string under each field in its source."""
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
    """Docstrings of the fields of a class and its bases."""
    notes: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base.__module__.startswith(PACKAGE):
            notes |= field_notes(base)
    return notes


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The section that is the value of a field, if there is one."""
    options = [annotation, *getattr(annotation, "__args__", ())]
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def shown_type(annotation: Any) -> str:  # noqa: PLR0911 one a kind of type
    """A type in the terms of TOML."""
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


def type_of(info: FieldInfo) -> str:
    """The type of a field; for a name in a registry, the built-in names."""
    registry = next((data.registry for data in info.metadata if isinstance(data, Named)), None)
    if registry is None:
        return shown_type(info.annotation)
    return ", ".join(f"`{name!r}`" for name in registry.built_in) + f" or another {registry.kind}"


def facts_of_functions(model: type[BaseModel], name: str) -> Iterator[str]:
    """What the built-in functions of [algorithm] say of a setting: which values it has, or which functions read it."""
    if model is not AlgorithmSection:
        return
    for setting, registry in (("advantage", ADVANTAGES), ("surrogate", POLICY_LOSSES)):
        if name == setting:
            for each in registry.built_in:
                summary = (inspect.getdoc(registry.load(each, "")) or "").partition("\n\n")[0]
                yield f"`{each}`: {' '.join(summary.split())}"
        elif names := readers(registry, name):
            yield f"Read by {', '.join(f'`{each}`' for each in names)}."


def lines_of(model: type[BaseModel], path: str) -> list[str]:
    """The table of a section, and the tables of the sections in it."""
    notes = inherited_notes(model)
    intro = " ".join((model.__doc__ or "").split())
    rows, inner = [], []
    for name, info in model.model_fields.items():
        section = inner_model(info.annotation)
        if section is Distribution:
            section = None
        if section is not None:
            named = ".<name>" if get_origin(info.annotation) is dict else ""
            inner.append((section, f"{path}.{name}{named}".removeprefix(".")))
            continue
        default = "required" if info.default is PydanticUndefined and info.default_factory is None else info.default
        if info.default_factory is not None:
            default = info.default_factory()
        if isinstance(default, Distribution):
            default = default.constant
        shown = str(default).lower() if isinstance(default, bool) else default
        text = "" if default is None else f"`{shown}`" if default != "required" else "required"
        meaning = " ".join(filter(None, [notes.get(name, ""), *facts_of_functions(model, name)]))
        rows.append(f"| `{name}` | {type_of(info)} | {text} | {meaning} |")
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
        "Generated by `python docs/make_config.py` from `relax_actors/config`. Every key can also be set on the",
        "command line as `section.key=value`. Paths in the file are relative to its folder; `run.folder`, and paths on",
        "the command line, are relative to the working directory. Unknown keys are refused.",
        "",
    ]
    return "\n".join([*head, *lines_of(Config, ""), *lines_of(Distribution, "distribution")]).rstrip() + "\n"


if __name__ == "__main__":
    TARGET.write_text(page())
