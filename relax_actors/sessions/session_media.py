"""Media in conversations of agents: what their messages show, prepared once and named by its hash from then on.

A client sends bytes as data URIs, or URLs that [media.urls] allows, never paths. The media of the row's own prompt are
in the messages of the agent's task as `relax-media:<number>`, and may be sent back as they are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash

from broker.codec import Array
from broker.subjects import RowId
from relax_actors.config import Config
from relax_actors.data.download import DownloadError
from relax_actors.data.media_fields import PART_TYPES, content_parts
from relax_actors.errors import RowError
from relax_actors.messages import MediaSource, Prompt, Turn
from relax_actors.sessions.observation_media import Observation, ObservationMedia
from relax_actors.training.row_media import RowMedia

OWN = "relax-media:"
"""Begins the name of a medium of the row's own prompt, before its number from 0."""
MAX_PARTS = 1024
"""Parts of all messages of a request."""
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


class SessionMedia:
    """Prepares what agents show to a model. The work is done in a thread of its own; coroutines run in the event loop.

    Args:
        config: configuration of a run of a multimodal model.
        media: prepares media.
        reader: reads media that were prepared.
    """

    def __init__(self, config: Config, media: ObservationMedia, reader: RowMedia) -> None:
        self._config, self._media, self._reader = config, media, reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="session-media")
        # Media of the rows that are held, by the hashes of their parts.
        self._known: dict[RowId, dict[str, MediaSource]] = {}

    def hold(self, row: RowId) -> None:
        """Remember the media of a row from now on."""
        self._known[row] = {}

    def forget(self, row: RowId) -> None:
        """Forget the media of a row."""
        self._known.pop(row, None)

    def close(self) -> None:
        """End the thread; what waits for it is not done."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def admit(self, row: RowId, own: Sequence[MediaSource], messages: Sequence[Message]) -> Shown:
        """Copy the media of messages to the store.

        Args:
            row: row of the session.
            own: media of its prompt.
            messages: of a client.

        Raises:
            RowError: a part is neither a text nor a medium, or a medium may not be used or cannot be read.
        """
        return await self._run(self._admit, row, own, messages)

    async def read(
        self, path: Sequence[Turn], length: int, tokens: Array, sources: Sequence[MediaSource], row: RowId
    ) -> Observation:
        """Expand the placeholders of tokens that follow a path of turns; see `ObservationMedia.append`.

        Args:
            path: turns from a root to the one that is continued; empty for a new root.
            length: their tokens.
            tokens: what is read behind them, with one placeholder for each medium.
            sources: media in the order of their placeholders.
            row: row of the session.

        Raises:
            RowError: a medium cannot be decoded, or does not fit its placeholder.
            StoreError: media of earlier turns are lost.
        """

        def work() -> Observation:
            before = self._reader.observed(self._reader.none, [one for turn in path for one in turn.media])
            return self._media.append(length, before, tokens, sources, row, f"the messages of a session of {row}")

        return await self._run(work)

    async def _run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _admit(self, row: RowId, own: Sequence[MediaSource], messages: Sequence[Message]) -> Shown:
        plain, sources = list[Message](), list[list[MediaSource]]()
        shown = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), list))
        if shown > MAX_PARTS:
            msg = f"the messages have {shown} parts, at most {MAX_PARTS}; leave some out"
            raise RowError(msg)
        for number, message in enumerate(messages):
            content, found = message.get("content"), list[MediaSource]()
            if isinstance(content, list):
                content = [self._part(part, row, own, found, f"messages[{number}]") for part in content]
            plain.append({**message, "content": content})
            sources.append(found)
        return Shown(plain, sources)

    def _part(self, part: Any, row: RowId, own: Sequence[MediaSource], found: list[MediaSource], where: str) -> Message:
        if not isinstance(part, Mapping):
            msg = f"{where} has a part that is a {type(part).__name__}; write an object with a type"
            raise RowError(msg)
        if (name := _own_name(part)) is not None:
            source = _numbered(own, name, where)
        else:
            key = xxhash.xxh3_128_hexdigest(json.dumps(part, sort_keys=True, default=str).encode())
            of_row = self._known.get(row, {})
            if (known := of_row.get(key)) is None:
                parts, media = content_parts([dict(part)], None, where)
                if parts[0]["type"] == "text":
                    return {**parts[0]}
                if not media or media[0].path:
                    msg = f"{where} has a medium without content; send a data URI, or a URL that [media.urls] allows"
                    raise RowError(msg)
                if media[0].options:
                    msg = f"{where} sets {min(media[0].options)!r} of a medium; this is set for all in [media]"
                    raise RowError(msg)
                try:
                    (known,) = self._media.admit(media, row, where)
                except DownloadError as error:
                    raise RowError(str(error)) from error
                of_row[key] = known
            source = known
        found.append(source)
        named = {"type": source.kind, "hash": source.xxh3_128 or source.sha256 or source.url}
        seconds = {name: value for name, value in (("start", source.start), ("end", source.end)) if value is not None}
        return named | seconds


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
    """Return the name of a medium of the row's own prompt that a part holds; None if it holds another one."""
    if part.get("type") not in PART_TYPES:
        return None
    for value in part.values():
        places = (value.get("url"), value.get("data")) if isinstance(value, Mapping) else (value,)
        if own := next((place for place in places if isinstance(place, str) and place.startswith(OWN)), ""):
            return own.removeprefix(OWN)
    return None


def _numbered(own: Sequence[MediaSource], name: str, where: str) -> MediaSource:
    if not name.isascii() or not name.isdigit() or len(name) > 6 or int(name) >= len(own):  # noqa: PLR2004
        msg = f"{where} names {OWN}{name[:20]}, but the prompt of the row has {len(own)} media, numbered from 0"
        raise RowError(msg)
    return own[int(name)]
