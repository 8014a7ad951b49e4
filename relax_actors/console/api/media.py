"""`/api/media`: an image, a video or a sound that a row refers to, by its digest; never by a path."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash
from starlette.responses import Response

from relax_actors.console.api.row import row_of
from relax_actors.console.errors import RequestError
from relax_actors.console.query import Query
from relax_actors.console.run import ConsoleRun
from relax_actors.errors import CodecError, StoreError
from relax_actors.messages import Prompt, Trajectory
from relax_actors.messages.media import MediaSource
from relax_actors.record.row_cells import RowCells

MAX_BYTES = 256 << 20
TYPES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (0, b"BM", "image/bmp"),
    (4, b"ftyp", "video/mp4"),
    (0, b"\x1aE\xdf\xa3", "video/webm"),
    (8, b"WAVE", "audio/wav"),
    (0, b"OggS", "audio/ogg"),
    (0, b"fLaC", "audio/flac"),
    (0, b"ID3", "audio/mpeg"),
    (0, b"\xff\xfb", "audio/mpeg"),
)
"""Formats that browsers show, by their first bytes. A page of text is none of them, so no answer is a page."""


async def answer(query: Query) -> Response:
    """Return the file of parameter `digest` that the row of parameter `row` refers to."""
    _, cells = await row_of(query)
    digest = query.text("digest")
    source = next((each for each in _sources(cells) if each.digest == digest), None)
    if source is None:
        msg = f"row {cells.row} refers to no medium with the digest {digest[:64]!r}"
        raise RequestError(404, msg, "unknown_medium")
    data = await asyncio.to_thread(_read, query.run, source)
    kind = next((kind for at, magic, kind in TYPES if data[at : at + len(magic)] == magic), None)
    if kind is None:
        msg = f"{source.kind} {digest} of {cells.row} has a format that browsers do not show"
        raise RequestError(415, msg, "unknown_format")
    return Response(data, media_type=kind)


def _sources(cells: RowCells) -> Iterator[MediaSource]:
    for field, expected in (("prompt", Prompt), ("trajectory", Trajectory)):
        with suppress(CodecError, StoreError, ValueError):
            cell: Any = cells.read(field, expected)
            if isinstance(cell, Prompt):
                yield from cell.media
            elif isinstance(cell, Trajectory):
                yield from (source for each in cell.observed for seen in each for source in seen.sources)


def _read(run: ConsoleRun, source: MediaSource) -> bytes:
    """Read the file of a medium, and check that it is the one that the row refers to.

    A row is written by an actor, which could name any file of this machine: only files of the store, of the folders of
    the data and of `media.folders` are read.

    Raises:
        RequestError: it is elsewhere, gone, larger than `MAX_BYTES`, or has changed.
    """
    path = _place(run, source)
    try:
        if path is None or not path.is_file():
            raise FileNotFoundError
        if path.stat().st_size > MAX_BYTES:
            msg = f"{source.kind} {source.digest} has more than {MAX_BYTES >> 20} MiB"
            raise RequestError(413, msg, "too_large")
        data = path.read_bytes()
    except OSError as error:
        msg = f"the file of {source.kind} {source.digest} is not on this machine, or was collected with its row"
        raise RequestError(404, msg, "lost_medium") from error
    digest = xxhash.xxh3_128_hexdigest(data) if source.xxh3_128 else hashlib.sha256(data).hexdigest()
    if digest != source.digest:
        msg = f"the file of {source.kind} {source.digest} has changed since the row was made"
        raise RequestError(409, msg, "changed_medium")
    return data


def _place(run: ConsoleRun, source: MediaSource) -> Path | None:
    """Return the path of a medium; None if it is in none of the folders that may be read."""
    if source.stored:
        with suppress(StoreError):
            return run.rows.stored(source.path)
        return None
    path = Path(source.path).resolve()
    return path if any(path.is_relative_to(folder) for folder in _folders(run)) else None


def _folders(run: ConsoleRun) -> Iterator[Path]:
    """Yield the folders whose files rows may refer to: those of the data, and `media.folders`."""
    settings = run.settings
    evaluation = settings.eval
    for data in (settings.data, None if evaluation is None else evaluation.data):
        if data is not None and (path := data.path) is not None:
            place = Path(path).resolve()
            yield place if place.is_dir() else place.parent
    media = settings.media
    yield from (Path(folder).resolve() for folder in (() if media is None else media.folders))
