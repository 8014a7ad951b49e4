"""Media that the episodes of one row read: those that its environments show, and those of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker.codec import Array
from broker.subjects import RowId
from relax_actors.config import Config
from relax_actors.data.media_fields import content_parts
from relax_actors.data.renderer import Message
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.errors import DownloadError, RowError
from relax_actors.messages import MediaSource, ObservedMedia
from relax_actors.sessions.observation_media import Observation, ObservationMedia
from relax_actors.training.row_media import RowMedia


class EpisodeMedia:
    """Prepares what environments show in one row. Used from the role's thread.

    Args:
        config: configuration of a run of a multimodal model.
        media: prepares media.
        reader: reads media that were prepared.
        row: the row; its step's folder in the store gets files and features.

    Attributes:
        none: media of no tokens.
    """

    def __init__(self, config: Config, media: ObservationMedia, reader: RowMedia, row: RowId) -> None:
        self._media, self._reader, self._row = media, reader, row
        data = config.data if config.eval is None or row.kind != "eval" else config.eval.data
        self._folder = Path.cwd() if data.path is None else data.path.parent
        self.none = reader.none

    def admit(self, messages: Sequence[Message], where: str) -> tuple[list[Message], list[MediaSource]]:
        """Copy the media of messages to the store.

        Returns:
            The messages with parts `{"type": "text", "text": ...}` and `{"type": <kind>}`, and their media in order.

        Raises:
            RowError: a part is neither a text nor a medium, or a medium may not be used or cannot be read.
        """
        where = f"{where} of {self._row}"
        plain, sources = list[Message](), list[MediaSource]()
        for message in messages:
            content: Any = message.get("content")
            if not isinstance(content, list):
                plain.append(message)
                continue
            parts, media = content_parts(content, self._folder, where)
            if without := [part["type"] for part in parts if part["type"] != "text"][len(media) :]:
                msg = f"{where}: {without[0]} without a file; give a path, url, data or bytes"
                raise RowError(msg)
            try:
                sources += self._media.admit(media, self._row, where)
            except DownloadError as error:
                raise RowError(str(error)) from error
            plain.append({**message, "content": parts})
        return plain, sources

    def read(
        self, length: int, before: PromptMedia, tokens: Array, sources: Sequence[MediaSource], where: str
    ) -> Observation:
        """Prepare what a sequence of `length` tokens reads next; see `ObservationMedia.append`."""
        return self._media.append(length, before, tokens, sources, self._row, f"{where} of {self._row}")

    def again(self, before: PromptMedia, observed: ObservedMedia) -> PromptMedia:
        """Return the media of a sequence that reads what was prepared before.

        Raises:
            StoreError: a segment is lost, and its raw file, too, or it has changed.
        """
        return self._reader.observed(before, [observed])
