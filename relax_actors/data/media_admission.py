"""Admission of media: permitted files and URLs, and the hash of their content."""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from broker.shared_files import SharedFiles
from broker.store import Store
from broker.subjects import RowId
from relax_actors.config.media import MediaSection
from relax_actors.data.task import Medium
from relax_actors.errors import ConfigError, RowError
from relax_actors.media.family import Family, family_of
from relax_actors.messages import MediaSource

_DIGEST = re.compile("xxh3:[0-9a-f]{32}|sha256:[0-9a-f]{64}")
_BLOCK = 1 << 20
_HASHES_KEPT = 1 << 16


class MediaAdmission:
    """Checks tasks' media and names their files; raises ConfigError for other models.

    Media that the data holds itself are copied to `store`; without it they are only checked.
    """

    def __init__(self, media: MediaSection, folder: Path, store: Store | None = None) -> None:
        family = family_of(folder)
        if family is None:
            msg = f"{folder} is a model of text alone; remove [media]"
            raise ConfigError(msg)
        self.family: Family = family
        self._media = media
        self._store = store
        self._shared = None if store is None else SharedFiles(store)
        self._folders = tuple(Path(os.path.realpath(path)) for path in media.folders)

    def sources(self, media: Sequence[Medium], row: RowId | None, where: str) -> list[MediaSource]:
        """Return the sources of a prompt's media; bytes in the data go to the store.

        Args:
            media: in the order of their placeholders.
            row: the row, whose step's folder gets the copies; None to check the media only.
            where: row of the data, for errors.

        Raises:
            RowError: a medium may not be used.
            StoreFullError: no space is left for a copy.
        """
        return [self._source(medium, row, where) for medium in media]

    def check_kinds(self, media: Sequence[Medium], where: str) -> None:
        """Check that the model takes media of these kinds; raises RowError if it does not take one."""
        kinds = self.family.kinds
        for medium in media:
            if medium.kind not in kinds:
                msg = (
                    f"{where}: the prompt has {medium.kind}, but a {self.family.model_type} model takes "
                    f"{', '.join(kinds)}; remove the row, or choose another model"
                )
                raise RowError(msg)

    def _source(self, medium: Medium, row: RowId | None, where: str) -> MediaSource:
        options = self._options(medium, where)
        if medium.digest and not _DIGEST.fullmatch(medium.digest):
            msg = (
                f"{where}: {medium.digest[:80]!r} is no hash; write xxh3:<32 digits> or sha256:<64 digits>, hexadecimal"
            )
            raise RowError(msg)
        fields: dict[str, Any] = {"start": medium.start, "end": medium.end, "options": options, "origin": where}
        try:
            if medium.url:
                return MediaSource(medium.kind, **self._download(medium, row, where), **fields)
            if medium.data:
                return MediaSource(medium.kind, **self._copy(medium, row, where), **fields)
            return MediaSource(medium.kind, **self._file(medium, where), **fields)
        except ValueError as error:  # of a range of seconds
            msg = f"{where}: {error}"
            raise RowError(msg) from error

    def _options(self, medium: Medium, where: str) -> dict[str, Any]:
        """Return the settings of a medium, of the types that those in [media] have."""
        if not medium.options:
            return {}
        section = getattr(self._media, medium.kind)
        try:
            changed = type(section).model_validate(section.model_dump() | medium.options)
        except ValidationError as error:
            first = error.errors()[0]
            msg = f"{where}: {'.'.join(map(str, first['loc']))} of {medium.kind}: {first['msg']}; correct the row"
            raise RowError(msg) from error
        if medium.options.get("audio") and self.family.audio is None:
            msg = f"{where}: a {self.family.model_type} model does not hear; remove `audio` from the video"
            raise RowError(msg)
        return {name: getattr(changed, name) for name in medium.options}

    def _download(self, medium: Medium, row: RowId | None, where: str) -> dict[str, Any]:
        if not self._media.urls.allow:
            msg = f"{where}: {medium.kind} {medium.url[:200]} is a URL; download it, or set media.urls.allow = true"
            raise RowError(msg)
        if not medium.digest:
            msg = f"{where}: {medium.kind} {medium.url[:200]} has no hash; add `sha256` or `xxh3` of the file beside it"
            raise RowError(msg)
        name, _, digest = medium.digest.partition(":")
        hashes = {"xxh3_128": digest} if name == "xxh3" else {"sha256": digest}
        return {"path": raw_path(row, digest), "stored": True, "url": medium.url, **hashes}

    def _copy(self, medium: Medium, row: RowId | None, where: str) -> dict[str, Any]:
        self._check_size(len(medium.data), f"{medium.kind} of the row", where)
        digest = xxhash.xxh3_128_hexdigest(medium.data)
        self._check_digest(medium, f"{medium.kind} of the row", digest, lambda: io.BytesIO(medium.data), where)
        if self._shared is not None and row is not None:
            self._shared.link(f"{digest}.raw", f"{row.kind}/{row.step}", lambda: [medium.data])
        return {"path": raw_path(row, digest), "xxh3_128": digest, "size": len(medium.data), "stored": True}

    def _file(self, medium: Medium, where: str) -> dict[str, Any]:
        folder = Path(os.path.realpath(medium.folder or Path.cwd()))
        if not medium.path or "\0" in medium.path:
            msg = f"{where}: {medium.kind} is empty; give a path, url, data or bytes"
            raise RowError(msg)
        path = Path(os.path.realpath(folder / medium.path))
        if not any(path.is_relative_to(allowed) for allowed in (folder, *self._folders)):
            msg = (
                f"{where}: {medium.kind} {str(path)[:200]!r} lies outside the folder of the data, {folder}; move it "
                "there, or add its folder to media.folders"
            )
            raise RowError(msg)
        try:
            state = path.stat()
            if not stat.S_ISREG(state.st_mode):
                msg = f"{where}: {medium.kind} {str(path)!r} is no regular file; correct the path"
                raise RowError(msg)
            self._check_size(state.st_size, f"{medium.kind} {str(path)!r}", where)
            digest = _hash_of(path, state.st_mtime_ns, state.st_size, state.st_ino)
        except OSError as error:
            msg = f"{where}: {medium.kind} {str(path)[:200]!r} cannot be read ({error.strerror}); correct the path"
            raise RowError(msg) from error
        self._check_digest(medium, f"{medium.kind} {str(path)!r}", digest, lambda: path.open("rb"), where)
        return {"path": str(path), "xxh3_128": digest, "size": state.st_size}

    def _check_size(self, size: int, what: str, where: str) -> None:
        limit = self._media.limits.max_bytes
        if size == 0:
            msg = f"{where}: {what} is empty; write the file again, or remove the row"
            raise RowError(msg)
        if size > limit:
            msg = (
                f"{where}: {what} has {size} bytes, more than media.limits.max_bytes = {limit}; shrink it or raise that"
            )
            raise RowError(msg)

    def _check_digest(
        self, medium: Medium, what: str, digest: str, read: Callable[[], io.BufferedIOBase], where: str
    ) -> None:
        """Compare a file with the hash that the data gives for it, if it does."""
        if not medium.digest:
            return
        own = f"xxh3:{digest}"
        if medium.digest.startswith("sha256:"):
            with read() as file:
                own = f"sha256:{hashlib.sha256(file.read()).hexdigest()}"
        if own != medium.digest:
            msg = f"{where}: {what} has hash {own}, not {medium.digest}; restore the file, or correct the row"
            raise RowError(msg)


def raw_path(row: RowId | None, digest: str) -> str:
    """Path in the store of a file that the data holds itself, or of a download."""
    return "" if row is None else f"{row.kind}/{row.step}/media.{digest}.raw"


@lru_cache(maxsize=_HASHES_KEPT)
def _hash_of(path: Path, changed: int, size: int, inode: int) -> str:  # noqa: ARG001 of what is cached
    """Return the hash of a file; remembered until the file changes."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
