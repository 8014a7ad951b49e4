"""What the configuration names: a user's class or function by its dotted path, an optional package by its name."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from types import ModuleType
from typing import Any

from relax_actors.errors import ConfigError


def load(path: str, setting: str) -> object:
    """Return what `path` names: `package.module.name` or `package.module:name`.

    The module is imported in the calling thread. `setting` is the TOML name that errors quote.

    Raises:
        ConfigError: no such form, the module is not found or raises on import, or it has no such name.
    """
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        msg = f"{setting} = {path!r} is no dotted path; write package.module.name or package.module:name"
        raise ConfigError(msg)
    module = _import(module_name, f"{setting} = {path!r}")
    try:
        return getattr(module, name)
    except AttributeError:
        close = _close(name, dir(module))
        where = getattr(module, "__file__", None) or "built in"
        remedy = close or "; define it there, or mend the name; an installed module goes before one of the same name"
        msg = f"{setting} = {path!r}: module {module_name} ({where}) has no {name!r}{remedy}"
        raise ConfigError(msg) from None


def import_extra(module: str, extra: str, needed_by: str) -> Any:
    """Import a module of an optional package; `needed_by` is the setting, with its value, that asks for it.

    Raises:
        ConfigError: the package is not installed, with the command that installs it, or it raises on import.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise _import_failed(module, needed_by, error) from error
        msg = f"{needed_by} needs the package {package!r}; pip install 'relax-actors[{extra}]'"
        raise ConfigError(msg) from None
    except (Exception, SystemExit) as error:
        raise _import_failed(module, needed_by, error) from error


def _import(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _import_failed(name, where, error) from error
        parent, _, missing = error.name.rpartition(".")
        remedy = _close(missing, _modules(parent)) or "; mend the path or put the module's folder on PYTHONPATH"
        msg = f"{where}: module {error.name} not found{remedy}"
        raise ConfigError(msg) from None
    except (Exception, SystemExit) as error:
        raise _import_failed(name, where, error) from error


def _import_failed(name: str, where: str, error: BaseException) -> ConfigError:
    return ConfigError(f"{where}: importing {name} raised {type(error).__name__}: {error}; mend the module")


def _modules(package: str) -> list[str]:
    """Names of the modules in `package`, or of those at the top when it is empty."""
    search = getattr(importlib.import_module(package), "__path__", []) if package else None
    return [module.name for module in pkgutil.iter_modules(search)]


def _close(name: str, known: list[str]) -> str:
    matches = difflib.get_close_matches(name, known)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
