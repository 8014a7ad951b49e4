"""Content-addressed files of the store that rows of several steps share.

`media/<name>` is hard-linked into the folder of every step that uses it, as `media.<name>`. The folder of a step goes
with its rows, so a file in `media` without another link is used by no row. Its link count is the only counter. Where
the file system has no hard links, steps get copies, and a file is kept for a time after its last use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from broker.errors import StoreError
from broker.store import Store

FOLDER = "media"
_ATTEMPTS = 100


class SharedFiles:
    """The shared files of a store. May be used from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def link(self, name: str, folder: str, make: Callable[[], Sequence[Any]]) -> str:
        """Link a file into the folder of a step, and return the link's path in the store.

        `name` contains the hash of the content; `make` returns it as buffers, and is called unless the file exists.

        Raises:
            StoreError: the file is removed as often as it is written.
            StoreFullError: no space is left.
        """
        uri, shared = f"{folder}/{FOLDER}.{name}", f"{FOLDER}/{name}"
        target, source = self._store.path(uri), self._store.path(shared)
        for _ in range(_ATTEMPTS):
            if target.exists():
                return uri
            if not source.exists():
                self._store.write_parts(shared, list(make()))
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(source, target)
            except FileExistsError:
                return uri
            except FileNotFoundError:
                continue  # the collector has removed the file as an orphan, or the step's folder
            except OSError:  # no hard links on this file system, or too many of the file
                if not self._copied(source, uri):
                    continue
            return uri
        msg = f"{shared} cannot be linked into {folder}: it was removed {_ATTEMPTS} times meanwhile"
        raise StoreError(msg)

    def _copied(self, source: Path, uri: str) -> bool:
        """Copy a file to a path in the store; return False if it is gone."""
        try:
            self._store.write_parts(uri, [source.read_bytes()])
            # It has no link that shows its use, so its time does: the collector keeps it for a while.
            os.utime(source)
        except FileNotFoundError:
            return False
        return True

    def discard(self, name: str, uri: str) -> None:
        """Remove a damaged file and one link to it, so that `link` writes it again."""
        for path in (f"{FOLDER}/{name}", uri):
            with suppress(FileNotFoundError):
                self._store.path(path).unlink()

    def remove_orphans(self, keep_seconds: float) -> int:
        """Remove unused files and files of killed writers; return their number.

        A writer that wants to link such a file meanwhile writes it again.
        """
        removed, now = 0, time.time()
        with suppress(FileNotFoundError), os.scandir(self._store.root / FOLDER) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    state = entry.stat(follow_symlinks=False)
                    # The time of the last change of the link count.
                    if state.st_nlink == 1 and now - state.st_ctime >= keep_seconds:
                        os.unlink(entry.path)  # noqa: PTH108 of thousands
                        removed += 1
        return removed
