"""Map the names of one kind of extension to the objects that implement them.

A name is looked up among the built-in entries, then among the entry points of installed packages. A dotted path names
an object of any importable module. Nothing that imports torch is imported before it is used.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from relax_actors.errors import ConfigError
from relax_actors.registry.dotted import check_path, load
from relax_actors.torchaudio_extension import permit_import

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Registry(Generic[T]):
    """Names of one kind of extension, each with the dotted path of its object.

    Args:
        kind: what the entries are, in the singular, as errors call it: "reward function".
        group: entry point group in which installed packages register theirs: "relax_actors.rewards".
        built_in: dotted path (`package.module:name`) of each built-in entry.
        modules: modules whose functions with an attribute `spec` are further built-in entries, by their names.
        attributes: attributes that an object must have to be usable.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        built_in: Mapping[str, str] = MappingProxyType({}),
        *,
        modules: Sequence[str] = (),
        attributes: Sequence[str] = (),
    ) -> None:
        self.kind, self.group = kind, group
        self._paths, self._modules, self._attributes = dict(built_in), tuple(modules), tuple(attributes)

    @cached_property
    def built_in(self) -> Mapping[str, str]:
        """Dotted path of each built-in entry; imports `modules`."""
        paths = dict(self._paths)
        for module in self._modules:
            names = vars(import_module(module)).items()
            own = [name for name, function in names if hasattr(function, "spec") and function.__module__ == module]
            paths |= {name: f"{module}:{name}" for name in own}
        return paths

    def __contains__(self, name: object) -> bool:
        """Whether a name is built in or registered; dotted paths are not looked up."""
        return name in self.built_in or any(entry.name == name for entry in self._installed())

    def names(self) -> list[str]:
        """Built-in names in their order, then those of installed packages."""
        return list(dict.fromkeys([*self.built_in, *sorted(entry.name for entry in self._installed())]))

    def check(self, name: str, setting: str = "") -> str:
        """Return `name` if it is registered or a dotted path, without importing it.

        Args:
            name: a registered name or a dotted path.
            setting: the configuration key that errors quote; empty if the caller adds it.

        Raises:
            ConfigError: the name is unknown, or two installed packages register it.
        """
        if name not in self.built_in and not is_dotted(name):
            self._entry_point(name, setting)
        elif is_dotted(name):
            check_path(name, setting)
        return name

    def load(self, name: str, setting: str) -> T:
        """Import and return the object behind a name or a dotted path.

        Raises:
            ConfigError: the name is unknown or ambiguous, its module does not import, or the object lacks an attribute.
        """
        if name in self.built_in:
            return cast("T", load(self.built_in[name], setting))
        entry = load(name, setting) if is_dotted(name) else self._import(self._entry_point(name, setting), setting)
        if missing := [attribute for attribute in self._attributes if not hasattr(entry, attribute)]:
            msg = (
                f"{_quoted(name, setting)}: {entry!r:.200} is not a usable {self.kind}: it has no {', '.join(missing)}"
            )
            raise ConfigError(msg)
        return cast("T", entry)

    def check_installed(self) -> None:
        """Raise ConfigError if packages register a name twice, or a built-in one."""
        entries: dict[str, EntryPoint] = {}
        for entry in self._installed():
            if entry.name in self.built_in:
                msg = (
                    f"{_described(entry)} registers the {self.kind} {entry.name!r}, which is built in; "
                    f"uninstall {_distribution(entry)}, or rename its entry point in group {self.group}"
                )
                raise ConfigError(msg)
            if entry.name in entries:
                raise self._ambiguous([entries[entry.name], entry], "")
            entries[entry.name] = entry

    def _installed(self) -> list[EntryPoint]:
        return list(_entry_points(tuple(sys.path)).select(group=self.group))

    def _entry_point(self, name: str, setting: str) -> EntryPoint:
        entries = [entry for entry in self._installed() if entry.name == name]
        if len(entries) > 1:
            raise self._ambiguous(entries, setting)
        if entries:
            return entries[0]
        known = self.names()
        close = difflib.get_close_matches(name, known)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        msg = (
            f"{_quoted(name, setting)} is not a known {self.kind}; {hint}known: {', '.join(known)}, entry points of "
            f"group {self.group!r}, or a dotted path such as package.module.name"
        )
        raise ConfigError(msg)

    def _ambiguous(self, entries: Sequence[EntryPoint], setting: str) -> ConfigError:
        several = " and ".join(_described(entry) for entry in entries)
        names = " or ".join(_distribution(entry) for entry in entries)
        text = f"{_quoted(entries[0].name, setting)}: {several} both register this {self.kind}; uninstall {names}"
        return ConfigError(text)

    def _import(self, entry: EntryPoint, setting: str) -> object:
        permit_import()  # the module may import transformers
        try:
            return entry.load()
        except (Exception, SystemExit) as error:
            where, package = _quoted(entry.name, setting), _distribution(entry)
            msg = (
                f"{where}: {_described(entry)} does not import: {type(error).__name__}: {error}; "
                f"update or reinstall {package}, or uninstall it and choose another {self.kind}"
            )
            raise ConfigError(msg) from error


@cache
def _entry_points(path: tuple[str, ...]) -> Any:
    """Entry points of all packages on `path`, which is `sys.path`."""
    from importlib.metadata import entry_points  # noqa: PLC0415 most processes look up built-in names only

    del path
    return entry_points()


def is_dotted(name: str) -> bool:
    """Whether a setting is a dotted path rather than a registered name."""
    return "." in name or ":" in name


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "its package"


def _described(entry: EntryPoint) -> str:
    version = f" {entry.dist.version}" if entry.dist is not None else ""
    return f"entry point '{entry.name} = {entry.value}' of {_distribution(entry)}{version}"


def _quoted(name: str, setting: str) -> str:
    return f"{setting} = {name!r}" if setting else repr(name)
