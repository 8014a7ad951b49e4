"""Durable folders (checkpoints, models): written aside, synced to disk, then renamed.

Invariant: a folder is visible under its name only when it is complete and on disk.
"""

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
"""File that lists the xxh3-128 digest of every other file of a checkpoint, by relative path."""
_RENAME_EXCHANGE, _HERE = 2, -100
_NAME = re.compile(r"(?P<unfinished>\.)?(?P<version>\d+)\.(?P<incarnation>\d+)(?(unfinished)\.\d+\.tmp)")


def write(folder: Path, save: Callable[[Path], None], on_full: Callable[[StoreFullError], None] = raise_error) -> None:
    """Let `save` fill a folder and publish it as `folder`, complete and durable.

    Raises:
        StoreFullError: the disk is full, and `on_full` gave up.
    """
    retry_when_full(lambda: _write(folder, save), folder.parent, f"{folder.parent.name}/{folder.name}", on_full)


def _write(folder: Path, save: Callable[[Path], None]) -> None:
    unfinished = create_temporary(folder)
    try:
        save(unfinished)
        commit(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def temporary_path(folder: Path) -> Path:
    """Return the path under which this process fills the folder that will become `folder`."""
    return folder.with_name(f".{folder.name}.{os.getpid()}.tmp")


def create_temporary(folder: Path) -> Path:
    """Create the empty folder `temporary_path(folder)` for `commit`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        if not Path(f"/proc/{left.name.split('.')[-2]}").exists():
            shutil.rmtree(left, ignore_errors=True)
    unfinished = temporary_path(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    return unfinished


def commit(unfinished: Path, folder: Path) -> None:
    """Publish the folder of `create_temporary` as `folder`, durably; replaces another."""
    for path in [*unfinished.rglob("*"), unfinished]:
        _sync(path)
    _exchange(unfinished, folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    _sync(folder.parent)


def seal(folder: Path) -> None:
    """Record the digests of a checkpoint's files, for `verify`."""
    (folder / DIGESTS).write_text(json.dumps(_digests(folder), indent=1))


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / DIGESTS:
            with path.open("rb") as file:
                hasher = xxhash.xxh3_128()
                while data := file.read(1 << 22):
                    hasher.update(data)
            digests[str(path.relative_to(folder))] = hasher.hexdigest()
    return digests


def verify(folder: Path) -> None:
    """Check that a checkpoint's files are those that were sealed.

    Raises:
        StoreError: a file is missing, added or changed; the message names it.
        OSError: a file cannot be read.
        ValueError: the list of digests is not JSON.
    """
    written, computed = json.loads((folder / DIGESTS).read_text()), _digests(folder)
    wrong = sorted(name for name in written.keys() | computed.keys() if written.get(name) != computed.get(name))
    if wrong:
        msg = f"file {wrong[0]} of {folder} is not what was written there"
        raise StoreError(msg)


def remove_stale(parent: Path, kept: Collection[str], version: int, incarnation: int) -> None:
    """Remove checkpoints that nobody will load, and those of dead writers.

    Args:
        parent: folder of the checkpoints, each named `<version>.<incarnation>`.
        kept: names of checkpoints to keep.
        version: last published version. Later ones stay: the caller may have been replaced without knowing it.
        incarnation: the caller's; unfinished folders of later incarnations stay.
    """
    for path in parent.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None or path.name in kept:
            continue
        if int(match["incarnation"]) < incarnation if match["unfinished"] else int(match["version"]) <= version:
            shutil.rmtree(path, ignore_errors=True)


def _exchange(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`, atomically where the file system can exchange two names."""
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
