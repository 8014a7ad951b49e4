"""Checkpoints on disk: written whole under a temporary name, forced to the disk, renamed, and only then published."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import xxhash

from broker.store import raise_error, retry_when_full
from relax_actors.errors import StoreError, StoreFullError

DIGESTS = "digests.json"
"""File of a checkpoint: xxh3-128 of each other one, by its path."""
_RENAME_EXCHANGE, _HERE = 2, -100
_NAME = re.compile(r"(?P<unfinished>\.)?(?P<version>\d+)\.(?P<incarnation>\d+)(?(unfinished)\.\d+\.tmp)")


def write(folder: Path, save: Callable[[Path], None], on_full: Callable[[StoreFullError], None] = raise_error) -> None:
    """Let `save` fill a folder and make it appear at `folder`, whole and durable; an older one there is replaced.

    Raises:
        StoreFullError: no space left, and `on_full` gave up.
    """
    retry_when_full(lambda: _write(folder, save), folder.parent, f"{folder.parent.name}/{folder.name}", on_full)


def _write(folder: Path, save: Callable[[Path], None]) -> None:
    unfinished = begin(folder)
    try:
        save(unfinished)
        put(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def place(folder: Path) -> Path:
    """Where this process fills a checkpoint that is to be at `folder`."""
    return folder.with_name(f".{folder.name}.{os.getpid()}.tmp")


def begin(folder: Path) -> Path:
    """Make `place` an empty folder, for `put`; what writers that died left of the same is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        if not Path(f"/proc/{left.name.split('.')[-2]}").exists():
            shutil.rmtree(left, ignore_errors=True)
    unfinished = place(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    return unfinished


def put(unfinished: Path, folder: Path) -> None:
    """Make what `begin` gave appear at `folder`, whole and durable; an older one there is replaced."""
    for path in [*unfinished.rglob("*"), unfinished]:
        _sync(path)
    _exchange(unfinished, folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    _sync(folder.parent)


def seal(folder: Path) -> None:
    """Write down what a checkpoint's files are, for `verify`."""
    (folder / DIGESTS).write_text(json.dumps(_digests(folder), indent=1))


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / DIGESTS:
            with path.open("rb") as file:
                hasher = xxhash.xxh3_128()
                while data := file.read(1 << 22):
                    hasher.update(data)
            found[str(path.relative_to(folder))] = hasher.hexdigest()
    return found


def verify(folder: Path) -> None:
    """See that a checkpoint's files are what was written.

    Raises:
        StoreError: one is missing, added or changed; names it.
        OSError: one cannot be read.
        ValueError: the list of digests is no JSON.
    """
    written, found = json.loads((folder / DIGESTS).read_text()), _digests(folder)
    wrong = sorted(name for name in written.keys() | found.keys() if written.get(name) != found.get(name))
    if wrong:
        msg = f"file {wrong[0]} of {folder} is not what was written there"
        raise StoreError(msg)


def collect(parent: Path, kept: Collection[str], version: int, incarnation: int) -> None:
    """Remove checkpoints that nobody will load, and what writers that died left unfinished or unpublished.

    Args:
        parent: folder of the checkpoints, each named `<version>.<incarnation>`.
        kept: names of those to keep.
        version: the last published one. Later ones stay: a life that was replaced and does not know it keeps off them.
        incarnation: the caller's; what a later life is writing stays.
    """
    for path in parent.iterdir():
        found = _NAME.fullmatch(path.name)
        if found is None or path.name in kept:
            continue
        if int(found["incarnation"]) < incarnation if found["unfinished"] else int(found["version"]) <= version:
            shutil.rmtree(path, ignore_errors=True)


def _exchange(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`; where the file system can, there is no moment without one of the two there."""
    libc = ctypes.CDLL(None, use_errno=True)
    exchanged = (
        folder.exists()
        and hasattr(libc, "renameat2")
        and libc.renameat2(_HERE, os.fsencode(new), _HERE, os.fsencode(folder), _RENAME_EXCHANGE) == 0
    )
    if not exchanged:
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
