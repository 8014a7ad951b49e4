"""Read a configuration: TOML, then `section.key=value` overrides, then validation with readable errors."""

from __future__ import annotations

import copy
import difflib
import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from relax_actors.config.data import PATH_EXAMPLE
from relax_actors.config.saved import holds_run, import_path_of, saved_tree
from relax_actors.config.schema import Config
from relax_actors.config.sections import MissingKeyError
from relax_actors.config.simulate import DEFAULTS
from relax_actors.config.stages import STAGES, names_of_stages, tree_of_stage
from relax_actors.errors import ConfigError

CODE_VARIABLE = "RELAX_CODE"
"""Environment variable of a process that imports a copy of the user's code: the folder of the copy."""
MAX_QUOTED = 500
MAX_DEPTH = 16
"""Most sections that enclose a setting."""
MAX_BYTES = 1 << 20
"""Size of a configuration."""


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML file, or the saved settings in the folder of a run, and apply overrides.

    Paths in the file are relative to its folder; paths in overrides, and `run.folder` anywhere, are relative to the
    working directory. Overrides `stages.<name>.section.key=value` are those of one stage.

    Raises:
        ConfigError: one line for each mistake, with the key and the remedy.
    """
    tree = load_tree(path, overrides)
    stage = run.get("stage") if isinstance(run := tree.get("run"), dict) else None
    return validate(tree, str(path) if stage is None else f"{path}, stage {stage}")


def load_tree(path: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """Read a TOML file and apply overrides, as `load_config`, without validating the settings.

    Raises:
        ConfigError: the file cannot be read, or an override is wrong.
    """
    tree = _read(path)
    make_importable(Path(import_path_of(path)))
    if holds_run(path):
        for override in overrides or []:
            _apply(tree, override)
        return tree
    for part in (tree, *_stages_in(tree)):
        _resolve_paths(part, path.resolve().parent)
    if "simulate" in tree:
        tree = _with_defaults(tree, DEFAULTS)
    return _overridden(tree, overrides or [], path)


def stages_of(path: Path, overrides: list[str] | None = None) -> list[str]:
    """Return the names of the stages of a file in order; none if it describes one run, or if overrides choose a stage.

    Raises:
        ConfigError: the file cannot be read, or a stage has no name of its own.
    """
    chosen = any(override.partition("=")[0].strip() == "run.stage" for override in overrides or [])
    return [] if chosen else names_of_stages(_read(path), str(path))


def _stages_in(tree: dict[str, Any]) -> list[dict[str, Any]]:
    stages = tree.get(STAGES, [])
    return [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []


def _overridden(tree: dict[str, Any], overrides: list[str], path: Path) -> dict[str, Any]:
    """Return the tree of the stage that is meant, with overrides, which stand above the settings of a stage."""
    own: dict[str, list[str]] = {}
    common = []
    for override in overrides:
        if override.startswith(f"{STAGES}."):
            _, name, setting = [*override.split(".", 2), "", ""][:3]
            own.setdefault(name, []).append(setting)
        else:
            common.append(override)
            _apply(tree, override)
    names = names_of_stages(tree, str(path))
    if unknown := sorted(own.keys() - set(names)):
        msg = f"override {STAGES}.{unknown[0]}: no stage has this name; stages: {', '.join(names) or 'none'}"
        raise ConfigError(msg)
    run = tree.get("run")
    if not names and not (isinstance(run, dict) and "stage" in run):
        return tree
    changed = copy.deepcopy(tree_of_stage(tree, str(path)))
    named = ("run.name", "run.folder", "run.stage")
    for override in [o for o in common if not o.startswith(named)] + own.get(changed["run"]["stage"], []):
        _apply(changed, override)
    return changed


def _read(path: Path) -> dict[str, Any]:
    """Read a TOML file; raises ConfigError if it cannot be read."""
    try:
        return _read_toml(path)
    except FileNotFoundError as error:
        msg = f"no configuration {path}; give the path of a TOML file, e.g. examples/demo/demo.toml"
        raise ConfigError(msg) from error
    except RecursionError as error:
        msg = f"{path} cannot be read as TOML: nested too deeply"
        raise ConfigError(msg) from error
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read as TOML: {error}"
        raise ConfigError(msg) from error


def set_by(path: Path, overrides: list[str] | None = None) -> dict[str, str]:
    """Return the dotted names of all settings that a file or an override sets, with "file" or "override"."""
    # An override of a table replaces that of the file. In a run's folder all keys are set, defaults included.
    tree = {} if holds_run(path) else _overridden(_read_toml(path), overrides or [], path)
    given: dict[str, Any] = {}
    for override in overrides or []:
        if not override.startswith(f"{STAGES}."):
            _apply(given, override)
    return dict.fromkeys(_keys(tree), "file") | dict.fromkeys(_keys(given), "override")


def _read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no TOML, is no file, or is larger than any configuration.
    """
    if holds_run(path):
        return saved_tree(path)
    if path.exists() and not path.is_file():
        msg = "it is a folder" if path.is_dir() else "it is no regular file"
        raise ValueError(msg)
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        msg = f"it has more than {MAX_BYTES >> 20} MiB"
        raise ValueError(msg)
    return tomllib.loads(data.decode())


def apply_settings(tree: dict[str, Any], overrides: list[str], source: str) -> Config:
    """Validate a copy of a tree with overrides applied; raises as `load_config`."""
    own: dict[str, Any] = copy.deepcopy(tree)
    for override in overrides:
        _apply(own, override)
    return validate(own, source)


def validate(tree: dict[str, Any], source: str) -> Config:
    """Validate a tree of settings; raises ConfigError with a line for each mistake, which names the `source`."""
    list(_keys(tree))  # refuses what is nested too deeply
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(*(_explain(source, e) for e in error.errors())) from error
    return config


class _LaterModules:
    """Finds modules of a copied package that were added after the copy was made, such as that of a later role.

    Python looks for the modules of a package with `__init__.py` in one place, the copy. Every process imports the
    classes of all roles, also those that joined the run later.
    """

    def __init__(self, copy: Path, folder: Path) -> None:
        self._copy, self._folder = copy, folder

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        """Find a module beside the original of its package; the last finder that Python asks."""
        del target
        places = [Path(place) for place in path or ()]
        own = [place.relative_to(self._copy) for place in places if place.is_relative_to(self._copy)]
        return PathFinder.find_spec(name, [str(self._folder / place) for place in own]) if own else None


def make_importable(folder: Path) -> None:
    """Make the modules in a folder importable by dotted paths, after all installed modules.

    A process that is to run a copy of the user's code imports it from there, before all others: only modules that no
    installed package has are copied, so that nothing else is replaced.
    """
    if (copy := os.environ.get(CODE_VARIABLE)) and copy not in sys.path:
        sys.path.insert(0, copy)
        sys.meta_path.append(_LaterModules(Path(copy), folder))
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _with_defaults(tree: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A tree whose missing keys are taken from defaults, section by section."""
    sections = {name: body | tree.get(name, {}) for name, body in defaults.items()}
    return tree | sections


EXAMPLES = {
    "model": PATH_EXAMPLE,
    "data": """\
  [data]
  kind = "jsonl"
  path = "tasks.jsonl"       # a row: {"prompt": "2 + 3 =", "answer": "5"}""",
    "data.kind": '  kind = "jsonl"',
    "eval.data": """\
  [eval.data]
  kind = "jsonl"
  path = "held_out.jsonl\"""",
    "model.tokenizer.alphabet": '  alphabet = "0123456789>#"',
    "trainer.warm_start.steps": "  steps = 12",
}
"""What to write for each key that has no default, as a part of a TOML file."""

_JUDGED = ("rubric_file", "calibration")
_PATHS = (
    ("model", "path"),
    ("critic", "path"),
    ("data", "path"),
    ("data", "mixture", "*", "path"),
    ("eval", "data", "path"),
    ("eval", "data", "mixture", "*", "path"),
    ("eval", "sets", "*", "data", "path"),
    ("eval", "sets", "*", "data", "mixture", "*", "path"),
    ("broker", "credentials"),
    ("broker", "ca"),
    ("store", "path"),
    ("rollout", "sglang", "api_key_file"),
    ("agent", "cwd"),
    ("agent", "gateway_token_file"),
    ("gateway", "token_file"),
    ("gateway", "certificate"),
    ("gateway", "certificate_key"),
    ("roles", "teacher", "model"),
    ("roles", "teacher", "models", "*"),
    ("roles", "teacher", "api_key_file"),
    ("roles", "reward_model", "model"),
    ("roles", "judge", "model"),
    *((*section, key) for section in (("roles", "judge"), ("reward", "options", "judge")) for key in _JUDGED),
)


def _resolve_paths(tree: dict[str, Any], base: Path) -> None:
    for *sections, key in _PATHS:
        for table in _tables(tree, sections):
            for name in [*table] if key == "*" else [key]:
                if isinstance(table.get(name), str):
                    table[name] = str(base / table[name])
    agent = tree.get("agent")
    command = agent.get("command") if isinstance(agent, dict) else None
    if isinstance(command, list) and command and isinstance(command[0], str) and "/" in command[0]:
        command[0] = str(base / command[0])  # a name without a slash is looked up on the PATH


def _tables(tree: Any, sections: list[str]) -> Iterator[dict[str, Any]]:
    """Return the tables at a path of sections, of which `*` stands for any name."""
    if not isinstance(tree, dict):
        return
    if not sections:
        yield tree
        return
    first, *rest = sections
    for inner in tree.values() if first == "*" else [tree.get(first)]:
        yield from _tables(inner, rest)


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not 1 < len(names) <= MAX_DEPTH or not all(names):
        msg = f"override {shortened(override)} is not of the form section.key=value, e.g. run.steps=10"
        raise ConfigError(msg)
    table = tree
    for name in names[:-1]:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            msg = f"override {shortened(override)}: {shortened(name)} is a value, not a section"
            raise ConfigError(msg)
        table = inner
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    table[names[-1]] = value


def shortened(value: object) -> str:
    """Return how an error quotes a value."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 4]} ..."


def _explain(source: str, error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        names = _names_in(Config, error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(names))}"
        return f"{source}: {where}: unknown key; {hint}"
    needed = error.get("ctx", {}).get("error")
    if isinstance(needed, MissingKeyError):
        where = f"{where}.{needed.key}"
    if error["type"] == "missing" or isinstance(needed, MissingKeyError):
        example = EXAMPLES.get(where, "")
        return f"{source}: {where}: is missing; add it" + (f", for example:\n{example}" if example else "")
    text = error["msg"].removeprefix("Value error, ")
    given = error["input"]
    secret = error["loc"] == ("broker", "url")  # may hold a password
    shown = "" if secret or isinstance(given, dict) or error["loc"] == () else f", got {shortened(given)}"
    return f"{source}: {where}: {text}{shown}" if where else f"{source}: {text}"


def _keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all values in a tree; raises ConfigError if sections are nested too deeply."""
    if prefix.count(".") >= MAX_DEPTH:
        msg = f"{shortened(prefix)} is nested more than {MAX_DEPTH} deep; no setting is"
        raise ConfigError(msg)
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _names_in(annotation: Any, path: Sequence[int | str]) -> list[str]:
    """Return the keys of the section at a path below an annotated type; none if it is no section."""
    if get_origin(annotation) is Annotated:
        return _names_in(get_args(annotation)[0], path)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields
        if not path:
            return list(fields)
        return _names_in(fields[str(path[0])].annotation, path[1:]) if path[0] in fields else []
    rest = path if get_origin(annotation) in (Union, UnionType) else path[1:]
    return next((names for option in get_args(annotation) if (names := _names_in(option, rest))), [])
