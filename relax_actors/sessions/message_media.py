"""Media in messages of agents and clients: prepared once, then named by their hashes.

A client sends bytes as data URIs, or URLs that [media.urls] allows, never paths. The media of a row's own prompt are in
the messages of the agent's task as `relax-media:<number>`, and may be sent back as they are.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import xxhash

from broker.codec import Array
from broker.subjects import RowId
from relax_actors.data.media_fields import PART_TYPES, content_part
from relax_actors.data.task import Medium
from relax_actors.errors import DownloadError, RowError, SlowRowError
from relax_actors.messages import MediaSource, Prompt, Turn
from relax_actors.sessions.observation_media import Observation, ObservationMedia

OWN = "relax-media:"
"""Begins the name of a medium of the row's own prompt, before its number from 0."""
MAX_PARTS = 1024
"""Parts of all messages of a request."""
MAX_DOWNLOADS = 16
"""Downloads of an actor at once."""
Message = dict[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Shown:
    """Messages whose media are in the store.

    Attributes:
        messages: with parts `{"type": "text", "text": ...}` and `{"type": <kind>, "hash": ...}`.
        sources: media of each message, in order.
    """

    messages: list[Message]
    sources: list[list[MediaSource]]

    def behind(self, count: int) -> list[MediaSource]:
        """Return the media behind the first `count` messages."""
        return [source for own in self.sources[count:] for source in own]


class MessageMedia:
    """Prepares media of clients: coroutines run in the event loop, the work in threads.

    Downloads have threads of their own, so that a slow server delays the requests alone that need it.
    """

    def __init__(self, media: ObservationMedia) -> None:
        self._media, self._reader, self._urls = media, media.reader, media.section.urls
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="message-media")
        self._downloading = ThreadPoolExecutor(MAX_DOWNLOADS, thread_name_prefix="message-download")
        # Media of the rows that are held, by the hashes of their parts.
        self._known: dict[RowId, dict[str, MediaSource]] = {}

    def hold(self, row: RowId) -> None:
        """Remember the media of a row from now on."""
        self._known[row] = {}

    def forget(self, row: RowId) -> None:
        """Forget the media of a row."""
        self._known.pop(row, None)

    def close(self) -> None:
        """End the threads; what waits for them is not done."""
        for pool in (self._thread, self._downloading):
            pool.shutdown(wait=False, cancel_futures=True)

    async def admit(self, row: RowId, own: Sequence[MediaSource], messages: Sequence[Message]) -> Shown:
        """Copy the media of a client's messages to the store, but those of the prompt, `own`.

        `row` is the row of the session; outside of sessions, a row that no table has.

        Raises:
            RowError: a part is neither a text nor a medium, or a medium may not be used or cannot be read.
            SlowRowError: too many downloads wait.
        """
        known = dict(self._known.get(row, {}))
        contents, new = await self._run(_contents, messages, own, known)
        work = [asyncio.ensure_future(self._admit(row, medium, where)) for medium, where in new.values()]
        if work:
            await asyncio.wait(work)  # also if one fails: no thread may write files behind their removal
        known |= zip(new, [one.result() for one in work], strict=True)
        if row in self._known:
            self._known[row] |= known
        plain, sources = list[Message](), list[list[MediaSource]]()
        for message, content in zip(messages, contents, strict=True):
            shown = list[MediaSource]()
            plain.append(message if content is None else {**message, "content": _named_parts(content, known, shown)})
            sources.append(shown)
        return Shown(plain, sources)

    async def _admit(self, row: RowId, medium: Medium, where: str) -> MediaSource:
        if not medium.url:
            return (await self._run(self._media.admit, [medium], row, where))[0]
        loop, begun = asyncio.get_running_loop(), time.monotonic()
        return await loop.run_in_executor(self._downloading, self._download, row, medium, where, begun)

    def _download(self, row: RowId, medium: Medium, where: str, begun: float) -> MediaSource:
        """Download a medium; it waits for a thread for at most as long as the download may take."""
        if time.monotonic() - begun > self._urls.timeout:
            msg = (
                f"{where}: {MAX_DOWNLOADS} other downloads went on for media.urls.timeout = {self._urls.timeout:g} s; "
                "try again"
            )
            raise SlowRowError(msg)
        try:
            return self._media.admit([medium], row, where)[0]
        except DownloadError as error:
            msg = f"{error}; try again, or send the bytes as a data URI"
            raise RowError(msg) from error

    async def read(
        self, path: Sequence[Turn], length: int, tokens: Array, sources: Sequence[MediaSource], row: RowId
    ) -> Observation:
        """Expand the placeholders of tokens behind a path of turns; see `ObservationMedia.append`.

        The path goes from a root to the turn that is continued, and has `length` tokens. `sources` are in the order of
        their placeholders, one each.

        Raises:
            RowError: a medium cannot be decoded, or does not fit its placeholder.
            StoreError: media of earlier turns are lost.
        """

        def work() -> Observation:
            before = self._reader.observed(self._reader.none, [one for turn in path for one in turn.media])
            try:
                return self._media.append(length, before, tokens, sources, row, "the messages")
            except SlowRowError:
                raise
            except RowError as error:
                if not any(str(error).startswith(source.origin) for source in sources):
                    raise
                msg = f"{error}; send another file, or leave it out"
                raise RowError(msg) from error

        return await self._run(work)

    def has_placeholders(self, tokens: Array) -> bool:
        """Whether tokens `[n] int32` hold placeholders of media."""
        return bool(np.isin(tokens, self._media.placeholders).any())

    async def _run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


Part = Message | MediaSource | str
"""A part of text, a medium of the row's own prompt, or the key of another medium."""
New = dict[str, tuple[Medium, str]]
"""Media that are not in the store yet by their keys, with what they are, for errors."""


def _contents(
    messages: Sequence[Message], own: Sequence[MediaSource], known: Mapping[str, MediaSource]
) -> tuple[list[list[Part] | None], New]:
    """Return each message's parts and unknown media; raises RowError for other parts."""
    shown = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), list))
    if shown > MAX_PARTS:
        msg = f"the messages have {shown} parts, at most {MAX_PARTS}; leave some out"
        raise RowError(msg)
    contents, new, count = list[list[Part] | None](), New(), 0
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            contents.append(None)
            continue
        parts = list[Part]()
        for index, part in enumerate(content):
            where = f"messages[{number}].content[{index}]"
            if not isinstance(part, Mapping):
                msg = f"{where} is a {type(part).__name__}; write an object with a type"
                raise RowError(msg)
            if is_medium(part):
                count += 1
                where = f"medium {count} of the request"
            parts.append(_part(part, own, known, new, where))
        contents.append(parts)
    return contents, new


def _part(
    part: Mapping[str, Any], own: Sequence[MediaSource], known: Mapping[str, MediaSource], new: New, where: str
) -> Part:
    if (name := _own_name(part)) is not None:
        return _numbered(own, name, where)
    key = xxhash.xxh3_128_hexdigest(json.dumps(part, sort_keys=True, default=str).encode())
    if key in known or key in new:
        return key
    text, medium = content_part(dict(part), None, where)
    if text["type"] == "text":
        return {**text}
    if medium is None or medium.path:
        msg = f"{where} has no content; send a data URI, or a URL that [media.urls] allows"
        raise RowError(msg)
    if medium.options:
        msg = f"{where} sets {min(medium.options)!r}; leave it out: [media] sets it for all"
        raise RowError(msg)
    new[key] = medium, where
    return key


def _named_parts(
    content: Sequence[Part], known: Mapping[str, MediaSource], sources: list[MediaSource]
) -> list[Message]:
    """Return parts with the media by their hashes; `sources` gets the media."""
    parts = list[Message]()
    for part in content:
        if isinstance(part, dict):
            parts.append(part)
            continue
        source = known[part] if isinstance(part, str) else part
        sources.append(source)
        named = {"type": source.kind, "hash": source.digest or source.url}
        seconds = {name: value for name, value in (("start", source.start), ("end", source.end)) if value is not None}
        parts.append(named | seconds)
    return parts


def is_medium(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is an image, a video or a sound."""
    kind = part.get("type")
    return isinstance(kind, str) and kind in PART_TYPES


def shows_media(messages: Sequence[Message]) -> bool:
    """Whether messages have parts that are media."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, Mapping) and is_medium(part) for part in parts)


def task_messages(prompt: Prompt) -> list[Message]:
    """Return the messages of a prompt as an agent sends them: its media by name, see `OWN`."""
    number, messages = 0, list[Message]()
    for message in prompt.messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                kind = PART_TYPES.get(str(part.get("type")))
                parts.append(part if kind is None else _named(kind, number))
                number += kind is not None
            content = parts
        messages.append({**message, "content": content})
    return messages


def _named(kind: str, number: int) -> Message:
    """Return a part that names a medium of the row's prompt, in the spelling of OpenAI's API."""
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": f"{OWN}{number}", "format": "wav"}}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"{OWN}{number}"}}


def _own_name(part: Mapping[str, Any]) -> str | None:
    """Return the name of a medium of the row's own prompt; None for another medium."""
    if not is_medium(part):
        return None
    for value in part.values():
        places = (value.get("url"), value.get("data")) if isinstance(value, Mapping) else (value,)
        if own := next((place for place in places if isinstance(place, str) and place.startswith(OWN)), ""):
            return own.removeprefix(OWN)
    return None


def _numbered(own: Sequence[MediaSource], name: str, where: str) -> MediaSource:
    if not name.isascii() or not name.isdigit() or len(name) > 6 or int(name) >= len(own):  # noqa: PLR2004
        msg = f"{where} is {OWN}{name[:20]}, but the prompt of the row has {len(own)} media, numbered from 0"
        raise RowError(msg)
    return own[int(name)]
