"""Import what a dotted path names, and optional packages, with errors that name the remedy."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from relax_actors.errors import ConfigError
from relax_actors.torchaudio_extension import permit_import


def check_path(path: str, setting: str) -> tuple[str, str]:
    """Split a dotted path into module and name.

    Args:
        path: `package.module.name` or `package.module:name`.
        setting: the configuration key that errors quote; empty if the caller adds it.

    Raises:
        ConfigError: the path has another form.
    """
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        where = f"{setting} = {path!r}" if setting else repr(path)
        msg = f"{where} is not a dotted path; write package.module.name or package.module:name"
        raise ConfigError(msg)
    return module, name


def load(path: str, setting: str) -> object:
    """Import and return what a dotted path names, in the calling thread.

    Raises:
        ConfigError: malformed path, module not found or failing on import, or no such name in the module.
    """
    module_name, name = check_path(path, setting)
    module = _import(module_name, f"{setting} = {path!r}")
    try:
        return getattr(module, name)
    except AttributeError:
        close = _close(name, _own_names(module))
        where = getattr(module, "__file__", None) or "built in"
        remedy = close or "; define it there or correct the name (an installed module wins over one of the same name)"
        msg = f"{setting} = {path!r}: module {module_name} ({where}) has no {name!r}{remedy}"
        raise ConfigError(msg) from None


def import_extra(module: str, extra: str, needed_by: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: dotted name of the module.
        extra: extra of this distribution that installs the package.
        needed_by: the setting, with its value, that needs the package.

    Raises:
        ConfigError: the package is not installed, or fails on import; names the install command.
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
    permit_import()  # the module may import transformers
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _import_failed(name, where, error) from error
        parent, _, missing = error.name.rpartition(".")
        remedy = _close(missing, _modules(parent)) or "; correct the path, or add the module's folder to PYTHONPATH"
        msg = f"{where}: module {error.name} not found{remedy}"
        raise ConfigError(msg) from None
    except (Exception, SystemExit) as error:
        raise _import_failed(name, where, error) from error


def _import_failed(name: str, where: str, error: BaseException) -> ConfigError:
    cause = f"{type(error).__name__}: {error}{_line(error)}"
    return ConfigError(f"{where}: importing {name} raised {cause}; fix the module")


def _line(error: BaseException) -> str:
    """File and line where an import failed, in parentheses; empty if unknown."""
    if isinstance(error, SyntaxError):
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _modules(package: str) -> list[str]:
    """Names of a package's public modules, or of the project's top-level ones."""
    search = getattr(importlib.import_module(package), "__path__", []) if package else _project_folders()
    return [module.name for module in pkgutil.iter_modules(search) if not module.name.startswith("_")]


def _project_folders() -> list[str]:
    """Folders of `sys.path` that hold neither Python's own modules nor installed packages."""
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [
        text
        for text in sys.path
        if Path(text).is_dir() and not any(Path(text).absolute().is_relative_to(path) for path in installed)
    ]


def _own_names(module: ModuleType) -> list[str]:
    """Public names that a module defines, or takes from other modules of its package."""
    package = module.__name__.partition(".")[0]

    def is_own(value: object) -> bool:
        origin = str(getattr(value, "__module__", None) or package)  # a constant has none
        return not isinstance(value, ModuleType) and origin.partition(".")[0] == package

    return [name for name, value in vars(module).items() if not name.startswith("_") and is_own(value)]


def _close(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known))
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
