"""The user's code that a role runs: files, version, and copies in the store.

The files are found without importing them: the modules that the settings name by dotted paths, and the modules that
these import, as far as they lie in the folder in which dotted paths are imported. Installed packages are left out. Of a
package with `__init__.py` all modules are copied: Python looks for a package in one place, the copy.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import xxhash

from broker.files import make_private_folder, write_private
from relax_actors.config import Config
from relax_actors.config.load import CODE_VARIABLE
from relax_actors.errors import ConfigError
from relax_actors.runtime.code_version import PACKAGES

CODE = "code"
"""Folder of the store with copies of users' code, by version."""
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_SAFE_VERSION = re.compile(r"[0-9a-f]{16}")


def code_files(config: Config, role: str, import_path: Path, *, whole_packages: bool = True) -> dict[str, Path]:
    """Return the files of the user that a role of `[roles]` or a built-in role may run.

    Args:
        config: settings of the run.
        role: a role of `[roles]` runs what its own table names, a built-in role what the other sections name.
        import_path: folder in which dotted paths are imported.
        whole_packages: whether a package with `__init__.py` counts with all its modules, or those that are imported.

    Returns:
        Files by their path below `import_path`, sorted.
    """
    tree = config.model_dump(mode="json")
    named = tree.pop("roles", {})
    names = [text.rpartition(".")[0] for text in _texts(named.get(role, tree)) if _DOTTED.fullmatch(text)]
    files: dict[str, Path] = {}
    todo, seen = names, set[str]()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for path in _files_of(name, import_path):
            key = path.relative_to(import_path)
            if str(key) in files:
                continue
            files[str(key)], package = path, ".".join(key.parent.parts)
            todo += _imports_of(path, package)
            if whole_packages and path.name == "__init__.py":
                todo += _modules_in(path.parent, package)
    return dict(sorted(files.items()))


def version_of(files: dict[str, Path]) -> str:
    """Return the version of code: 16 hex digits over names and content; empty without files."""
    if not files:
        return ""
    digest = xxhash.xxh3_64()
    for name, path in files.items():
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def running_version(config: Config, role: str, import_path: Path) -> str:
    """Return the version of the user's code in this process for a role; empty without any."""
    if copy := os.environ.get(CODE_VARIABLE):
        return Path(copy).name
    try:
        return version_of(code_files(config, role, import_path))
    except OSError:  # a file was removed just now
        return ""


def keep_code(store: Path, files: dict[str, Path]) -> str:
    """Copy the files to `<store>/code/<version>`, unless they are there, and return the version.

    Raises:
        ConfigError: a file changed while it was copied, or the copy cannot be written.
    """
    version = version_of(files)
    folder = store / CODE / version
    if not version or kept_code(store, version) is not None:
        return version
    try:
        make_private_folder(folder)
        for name, path in files.items():
            make_private_folder((folder / name).parent)
            write_private(folder / name, path.read_bytes())
    except OSError as error:
        msg = f"the code cannot be copied to {folder}: {error}; make the folder writable, or make room"
        raise ConfigError(msg) from error
    if version_of(_copied(folder)) != version:
        msg = "a file of the code was changed while it was copied; repeat the command when you have saved all files"
        raise ConfigError(msg)
    return version


def kept_code(store: Path, version: str) -> Path | None:
    """Return the folder with a complete copy of a version; None if there is none."""
    folder = store / CODE / version
    if not _SAFE_VERSION.fullmatch(version) or not folder.is_dir():
        return None
    return folder if version_of(_copied(folder)) == version else None


def forget_modules(files: Iterable[Path]) -> None:
    """Have the next import of modules of these files read the files again."""
    wanted = {str(path) for path in files}
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) in wanted:
            del sys.modules[name]


def _copied(folder: Path) -> dict[str, Path]:
    return dict(sorted((str(path.relative_to(folder)), path) for path in folder.rglob("*.py")))


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a tree of settings, keys included: functions with weights are keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _files_of(module: str, import_path: Path) -> Iterator[Path]:
    """Yield the files of a module and of the packages around it."""
    parts = module.split(".")
    if not _is_own(parts[0], import_path):
        return
    for n in range(1, len(parts) + 1):
        at = import_path.joinpath(*parts[:n])
        if (path := at / "__init__.py").is_file():
            yield path
        elif (path := at.with_suffix(".py")).is_file():
            yield path
            return


def _modules_in(folder: str | os.PathLike[str], package: str) -> Iterator[str]:
    """Yield the modules of a package and of its folders; links to folders are left out."""
    with os.scandir(folder) as entries:
        for entry in entries:
            stem, suffix = os.path.splitext(entry.name)  # noqa: PTH122 a folder may have 100,000 files of data
            if not stem.isidentifier():
                continue
            if suffix == ".py":
                yield f"{package}.{stem}"
            elif not suffix and entry.is_dir(follow_symlinks=False):
                yield f"{package}.{stem}"
                if not os.path.exists(f"{entry.path}/__init__.py"):  # noqa: PTH110
                    yield from _modules_in(entry.path, f"{package}.{stem}")


def _is_own(name: str, import_path: Path) -> bool:
    """Whether a top-level module is in the folder and in no installed package."""
    exists = any((import_path / part).exists() for part in (name, f"{name}.py"))
    if not exists or name in PACKAGES or name in sys.stdlib_module_names:
        return False
    others = [path for path in sys.path if path and Path(path).resolve() not in (import_path.resolve(), Path.cwd())]
    return PathFinder.find_spec(name, others) is None


def _imports_of(path: Path, package: str) -> list[str]:
    """Return the modules that a file may import; nothing for a file with errors."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*(above if package else []), *([node.module] if node.module else [])])
            names += [name for alias in node.names for name in (base, f"{base}.{alias.name}") if name.strip(".")]
    return names
