"""Read media from the fields of a row and from the content parts of its messages.

A medium is a path, a data URI, a URL, bytes, or an object with one of them and settings; the spellings of chat datasets
(`image_url`, `input_audio`, Hugging Face's `{"bytes", "path"}`) mean the same.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from relax_actors.config.media import KINDS
from relax_actors.data.plain import plain
from relax_actors.data.task import Medium
from relax_actors.errors import RowError
from relax_actors.messages.media import AUDIO, IMAGE, KINDS_OF_MEDIA

SIDE_FIELDS = {f"{kind}{ending}": kind for kind in KINDS_OF_MEDIA for ending in ("s", "")}
"""Fields of a row that hold its media: `images` or `image`, and so on."""
PART_TYPES = {text.format(kind): kind for kind in KINDS_OF_MEDIA for text in ("{}", "{}_url", "input_{}")}
"""Kind of medium by the `type` of a content part."""
OPTIONS = {kind: tuple(section.model_fields) for kind, section in KINDS.items()}
"""Settings that a single medium may have, as [media.<kind>]."""
_PLACES = ("path", "url", "data", "bytes")
_IGNORED = ("detail", "format", "type", "array", "sampling_rate")
_SECONDS = {"start": "start", "end": "end", "video_start": "start", "video_end": "end"}
_HASHES = {"hash": "", "digest": "", "xxh3": "xxh3:", "sha256": "sha256:"}


def side_media(row: dict[str, Any], folder: Path, where: str) -> tuple[dict[str, Any], tuple[Medium, ...]]:
    """Take the media out of a row's fields `images`, `videos`, `audios`.

    Returns:
        The other fields, and the media of each kind in order.

    Raises:
        RowError: one is no medium.
    """
    rest, media = dict(row), []
    for name, kind in SIDE_FIELDS.items():
        value = rest.pop(name, None)
        items = value if isinstance(value, list) else [] if value is None else [value]
        for number, item in enumerate(items, 1):
            media.append(medium_of(kind, item, folder, f"{where}, field {name!r}, item {number}"))
    return rest, tuple(media)


def content_parts(
    parts: list[dict[str, Any]], folder: Path | None, where: str
) -> tuple[list[dict[str, str]], list[Medium]]:
    """Normalise a message's content parts: `{"type": "text", ...}` and `{"type": <kind>}`.

    A part without a medium of its own stands for the next one in the row's fields.

    Returns:
        The parts, and their media in order.

    Raises:
        RowError: a part is neither a text nor a medium.
    """
    pairs = [content_part(part, folder, f"{where}, part {number}") for number, part in enumerate(parts, 1)]
    return [part for part, _ in pairs], [medium for _, medium in pairs if medium is not None]


def content_part(part: dict[str, Any], folder: Path | None, at: str) -> tuple[dict[str, str], Medium | None]:
    """Normalise a content part; those of clients have no `folder`, but bytes or a URL."""
    given = {key: value for key, value in part.items() if value is not None}
    name = given.get("type") or next((key for key in given if key in PART_TYPES), "text")
    if name in ("text", "input_text"):
        text = given.get("text")
        if not isinstance(text, str):
            msg = f"{at}: no text; write {{'type': 'text', 'text': ...}}"
            raise RowError(msg)
        return {"type": "text", "text": text}, None
    kind = PART_TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        msg = f"{at}: type {str(name)[:40]!r} is not known; write text, image, video or audio"
        raise RowError(msg)
    rest = {key: value for key, value in given.items() if key != "type"}
    own = rest.pop(next((key for key in rest if PART_TYPES.get(key) == kind), ""), None)
    if own is not None:
        rest = {**(own if isinstance(own, dict) else {"": own}), **rest}
    return {"type": kind}, medium_of(kind, rest, folder, at) if rest else None


def plain_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose media are parts `{"type": <kind>}`, as `content_parts` makes them."""
    plain = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            kinds = [PART_TYPES.get(part.get("type", "")) for part in content]
            parts = [{"type": kind} if kind else part for kind, part in zip(kinds, content, strict=True)]
            message = {**message, "content": parts}  # noqa: PLW2901
        plain.append(message)
    return plain


def medium_of(kind: str, value: Any, folder: Path | None, where: str) -> Medium:
    """Return the medium of a row's value; raises RowError if it is none."""
    if isinstance(value, Medium):
        return value if value.folder is not None else replace(value, folder=folder)
    fields = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {"": value}
    given = [fields.pop(name) for name in ("", "bytes", "data", "url", "path") if name in fields]
    if not given:
        msg = f"{where}: {kind} without a file; give a path, url, data or bytes"
        raise RowError(msg)
    medium = Medium(kind, folder=folder, **_place(kind, given[0], where, has_paths=folder is not None))
    taken: dict[str, Any] = {}
    for name, item in fields.items():
        if name in OPTIONS[kind]:
            taken.setdefault("options", {})[name] = item
        elif name in _SECONDS and kind != IMAGE:
            taken[_SECONDS[name]] = _number(item, f"{where}, {name!r}")
        elif name in _HASHES:
            taken["digest"] = f"{_HASHES[name]}{item}"
        elif name not in _IGNORED:
            known = ", ".join((*_PLACES, *_HASHES, *(() if kind == IMAGE else ("start", "end")), *OPTIONS[kind]))
            msg = f"{where}: {kind} has an unknown field {name[:40]!r}; known: {known}"
            raise RowError(msg)
    return replace(medium, **taken)


def _place(kind: str, value: Any, where: str, *, has_paths: bool) -> dict[str, Any]:
    """Return the fields of a `Medium` that say where its content is."""
    if isinstance(value, bytes | bytearray):
        return {"data": bytes(value)}
    if isinstance(value, Path):
        return {"path": str(value)}
    if not isinstance(value, str):
        msg = f"{where}: a {type(value).__name__} is no {kind}; give a path, a URL, a data URI or bytes"
        raise RowError(msg)
    if not value.isascii() and value != plain(value):
        msg = f"{where}: half a surrogate pair in {value[:60]!r}; write the whole character"
        raise RowError(msg)
    if value.startswith("data:"):
        return {"data": _decoded(value.partition(",")[2], kind, where)}
    if value.startswith(("http://", "https://")):
        url, _, fragment = value.partition("#")
        name, _, digest = fragment.partition("=")
        return {"url": url, "digest": f"{name}:{digest}"} if name in ("sha256", "xxh3") else {"url": value}
    # `input_audio` has base64 without the head of a data URI.
    if kind == AUDIO and (len(value) > _LONGEST_PATH or not has_paths):
        return {"data": _decoded(value, kind, where)}
    return {"path": value.removeprefix("file://")}


_LONGEST_PATH = 4096


def _decoded(text: str, kind: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        msg = f"{where}: {kind} is no base64 ({error}); write data:<type>;base64,<data>"
        raise RowError(msg) from error


def _number(value: Any, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    msg = f"{where}: {value!r:.40} is no number of seconds"
    raise RowError(msg)
