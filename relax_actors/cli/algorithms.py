"""`relax algorithms`: presets of [algorithm], and a run's settings with their sources."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_actors.errors import ConfigError

if TYPE_CHECKING:
    from relax_actors.config import Config
    from relax_actors.config.algorithm import AlgorithmSection


def algorithms(
    name: Annotated[str | None, typer.Argument(help="Preset to show in full, e.g. gspo.", metavar="NAME")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON a preset.")] = False,
) -> None:
    """List the presets of `algorithm.name`: formula, source, and what each needs.

    With NAME, show all formulas and settings of one.
    """
    from relax_actors.config.presets import PRESETS, named

    try:
        names = [name] if name is not None and named(name) else list(PRESETS)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if json:
        for each in names:
            typer.echo(json_module.dumps(_described(each)))
    elif name is not None:
        typer.echo("\n".join(_page(name)))
    else:
        typer.echo("\n".join(_list(names)).rstrip())


def algorithm_lines(config: Config, set_by: Mapping[str, str]) -> Iterator[str]:
    """Yield set settings of [algorithm] with their sources, for `relax check`.

    Settings without an effect are left out; those with their defaults are counted. `set_by` is as
    `relax_actors.config.load.set_by` returns it.
    """
    from relax_actors.algorithms.unused_settings import idle
    from relax_actors.config.presets import filled, leaves

    algorithm = config.algorithm
    hidden = {*idle(algorithm), "name"}
    preset = dict(leaves(filled({"name": algorithm.name})))
    settings = [(key, value) for key, value in leaves(algorithm.model_dump()) if key not in hidden]
    shown = []
    for key, value in settings:
        source = set_by.get(f"algorithm.{key}") or (f"preset {algorithm.name}" if key in preset else "")
        if not source and key in ("length", "shaping.overlong_buffer") and value is not None:
            source = "from rollout.max_tokens"
            if key != "length" and config.longest_sample != config.rollout.max_tokens:
                source = "from environment.token_budget"
        if source:
            shown.append(f"  {key:<28} {_shown(value):<24} {source}")
    name = algorithm.name or "no preset"
    yield f"algorithm: {name}; {len(settings) - len(shown)} settings have their defaults (--resolved prints them)"
    yield from shown


def _section(name: str) -> AlgorithmSection:
    from relax_actors.config.algorithm import AlgorithmSection

    return AlgorithmSection(name=name)


def _described(name: str) -> dict[str, Any]:
    from relax_actors.algorithms.formulas import formulas, needs
    from relax_actors.config.presets import PRESETS

    preset, section = PRESETS[name], _section(name)
    return {
        "name": name,
        "title": preset.title,
        "source": preset.source,
        "figures": preset.figures,
        "formulas": {formula.part: formula.plain for formula in formulas(section)},
        "needs": needs(section),
        "settings": dict(preset.settings),
        "note": preset.note,
    }


def _page(name: str) -> Iterator[str]:
    from relax_actors.config.presets import leaves

    described = _described(name)
    yield f"{name}: {described['title']}, {described['source']}"
    yield ""
    for part, plain in described["formulas"].items():
        yield f"  {part:<12} {plain}"
    yield ""
    yield f"  needs        {', '.join(described['needs']) or 'rewards only'}"
    for part in ("note", "figures"):
        if described[part]:
            yield f"  {part:<12} {described[part]}"
    yield ""
    yield f'[algorithm] with name = "{name}" sets'
    for key, value in leaves(described["settings"]):
        yield f"  {key} = {_shown(value)}"


def _list(names: list[str]) -> Iterator[str]:
    """Yield the formulas of presets, with the numbers that they name."""
    from relax_actors.algorithms.formulas import constants

    for name in names:
        described = _described(name)
        needed = f"; needs {', '.join(described['needs'])}" if described["needs"] else ""
        yield f"{name}: {described['title']}, {described['source']}{needed}"
        for part, plain in described["formulas"].items():
            yield f"  {part:<12} {plain}"
        if numbers := constants(_section(name)):
            yield f"  {'with':<12} {', '.join(f'{key} = {_shown(value)}' for key, value in numbers.items())}"
        yield ""


def _shown(value: Any) -> str:
    return "unset" if value is None else json_module.dumps(value)
