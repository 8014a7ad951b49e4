"""Media of observations: what an environment or a tool shows during generation.

They are prepared as the media of prompts are, once, before the model reads them; rollout and trainer then read the same
bits from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from broker.codec import Array
from broker.subjects import RowId
from relax_actors.data.media_admission import MediaAdmission
from relax_actors.data.media_fields import content_parts
from relax_actors.data.task import Medium
from relax_actors.engines.protocols.media import PromptMedia, items_of
from relax_actors.errors import ConfigError, DownloadError, RowError
from relax_actors.messages import MediaSource, ObservedMedia
from relax_actors.runtime import Context
from relax_actors.training.media_preparer import MediaPreparer
from relax_actors.training.row_media import RowMedia

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """An observation that was prepared for a sequence.

    Attributes:
        tokens: `[n] int32`, its tokens with all placeholders; the sequence goes on with them.
        media: media and positions of the sequence up to the end of the observation, for `GenerationRequest.media`.
        observed: what a cell must hold, so that `RowMedia.observed` gives the same `media` again; None if the
            observation is text alone.
    """

    tokens: Array
    media: PromptMedia
    observed: ObservedMedia | None = None


class ObservationMedia:
    """Prepares media during a rollout; `admit` from any thread, `append` from one.

    Args:
        context: context of the actor, in a run of a multimodal model.
        reader: reads media that were prepared.
        progress: called between two media, and while a download goes on.

    Attributes:
        reader: as given.
        section: section [media] of the run.
        family: family of the model.
        placeholders: tokens that stand for media.

    Raises:
        ConfigError: the model reads text alone or is not supported, or the settings do not fit it.
    """

    def __init__(self, context: Context, reader: RowMedia, progress: Callable[[], None] = lambda: None) -> None:
        config, store = context.config, context.table.store
        if config.media is None:
            msg = f"an observation holds media, and {config.model_path} is a model of text alone; choose another model"
            raise ConfigError(msg)
        self._config, self.section, self.reader = config, config.media, reader
        self._admission = MediaAdmission(config.media, config.model_path, store)
        from relax_actors.data.download import Downloads  # noqa: PLC0415 `relax check` loads every role

        self._downloads = Downloads(config.media, store, progress)
        self._preparer, self._progress = MediaPreparer(config, store), progress
        self.family = self._preparer.family
        self.placeholders = [*self.family.kinds_by_id]

    def admit(self, media: Sequence[Medium], row: RowId, where: str) -> list[MediaSource]:
        """Copy media to the store; files must lie in a folder that [media] allows.

        The step's folder of `row` gets them; `where` names them in errors.

        Raises:
            RowError: a medium may not be used, or cannot be read.
            DownloadError: a URL does not answer; another attempt may succeed.
            StoreFullError: no space is left.
        """
        self._admission.check_kinds(media, where)
        return [self._source(medium, row, where) for medium in media]

    def admit_messages(
        self, messages: Sequence[Message], row: RowId, where: str
    ) -> tuple[list[Message], list[MediaSource]]:
        """Copy the media of an environment's messages to the store; see `admit`.

        Returns:
            The messages with parts `{"type": "text", "text": ...}` and `{"type": <kind>}`, and their media in order.
        """
        config, plain, sources = self._config, list[Message](), list[MediaSource]()
        data = config.data if (own := config.held_out(row)) is None else own.source
        folder = Path.cwd() if data.path is None else data.path.parent
        for message in messages:
            content: Any = message.get("content")
            if not isinstance(content, list):
                plain.append(message)
                continue
            parts, media = content_parts(content, folder, where)
            if without := [part["type"] for part in parts if part["type"] != "text"][len(media) :]:
                msg = f"{where}: {without[0]} without a file; give a path, url, data or bytes"
                raise RowError(msg)
            try:
                sources += self.admit(media, row, where)
            except DownloadError as error:
                raise RowError(str(error)) from error
            plain.append({**message, "content": parts})
        return plain, sources

    def append(
        self, length: int, before: PromptMedia, tokens: Array, sources: Sequence[MediaSource], row: RowId, where: str
    ) -> Observation:
        """Prepare an observation that follows a sequence of `length` tokens with the media `before`.

        Its positions go on where those of the sequence end. Prepared as one prompt with the sequence it gets the same
        tokens, and the same positions unless the sequence ends with a video that is longer in time than in space.
        `tokens` `[n] int32` have one placeholder for each of `sources`, in order.

        Raises:
            RowError: a medium cannot be read or exceeds a limit, or does not fit its placeholder.
            StoreFullError: no space is left.
        """
        if length and not sources and not np.isin(tokens, self.placeholders).any():
            return Observation(tokens, before)
        features, references = self._preparer.stored(sources, f"{row.kind}/{row.step}", self._progress)
        first = float(before.positions_of(length + 1)[0, -1])
        try:
            whole = self._preparer.expand_tokens(tokens, features, first)
        except RowError as error:
            msg = f"{where}: {error}"
            raise RowError(msg) from error
        records = self._preparer.records(features, references, whole)
        observed = ObservedMedia(length, list(sources), records, whole.positions)
        items = items_of(records, [one.array for one in features])
        return Observation(whole.tokens, before.extended(length, whole.positions, items), observed)

    def _source(self, medium: Medium, row: RowId, where: str) -> MediaSource:
        """Return a source whose file is in the store."""
        (source,) = self._admission.sources([medium], row, where)
        if source.url:
            self._downloads.fetch(source)
        elif not source.stored:
            data = Path(source.path).read_bytes()
            (source,) = self._admission.sources([replace(medium, path="", data=data)], row, where)
        return source
