"""Media of a row as engines get them, from the columns `prompt` and `media`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.codec import Array
from broker.fields import TensorRef
from broker.subjects import RowId
from relax_actors.engines.protocols.media import PromptMedia, items_of
from relax_actors.errors import RowError, StoreError
from relax_actors.messages import Media, MediaSource, ObservedMedia, PreparedPrompt, Prompt
from relax_actors.runtime.context import Context


class MediaReader:
    """Reads the features of media from the store. A lost or damaged segment is made again from the raw file.

    Args:
        context: context of the actor that computes with them.
    """

    def __init__(self, context: Context) -> None:
        self._context, self._store = context, context.table.store
        self.rebuilt = 0
        """Segments that were made again."""

    def read(self, prepared: PreparedPrompt, row: RowId) -> PromptMedia:
        """Return the media of a row; one object for all of its samples. Call it in the role's thread.

        Args:
            prepared: column `media` of the row.
            row: the row, whose prompt is looked up for a lost segment.

        Raises:
            StoreError: a segment is lost, and its raw file, too, or it has changed.
        """
        table = self._context.table

        def sources() -> list[MediaSource]:
            prompt = table.fetch(table.subject(row, "prompt"), Prompt)
            return [] if prompt is None else prompt.media

        items = items_of(prepared.media, self._arrays(prepared.media, sources))
        return PromptMedia(items, prepared.positions, prepared.position_delta)

    def observed(self, before: PromptMedia, observations: Sequence[ObservedMedia]) -> PromptMedia:
        """Return the media of a sequence that has read observations after its prompt, in order.

        Args:
            before: media of the row's prompt.
            observations: those of the sequence that hold media.

        Raises:
            StoreError: a segment is lost, and its raw file, too, or it has changed.
        """
        for each in observations:
            arrays = self._arrays(each.media, lambda each=each: each.sources)  # type: ignore[misc]
            before = before.extended(each.start, each.positions, items_of(each.media, arrays))
        return before

    def _arrays(self, media: Sequence[Media], sources: Callable[[], Sequence[MediaSource]]) -> list[Array]:
        """Return the features of media; `sources` returns their raw files."""
        resolve, arrays = self._store.reader(), []
        for number, medium in enumerate(media):
            try:
                arrays.append(resolve(medium.features))
            except StoreError as error:
                before = sum(other.source == medium.source for other in media[:number])
                arrays.append(self._rebuild(medium, before, sources(), error))
        return arrays

    def _rebuild(self, medium: Media, number: int, sources: Sequence[MediaSource], lost: StoreError) -> Array:
        """Make the segment of a medium again, and return the array `number` of its file."""
        from relax_actors.training.media_preparer import MediaPreparer  # noqa: PLC0415 hardly ever needed

        reference = medium.features
        if medium.source >= len(sources):
            raise lost
        source = sources[medium.source]
        try:
            preparer = MediaPreparer(self._context.config, self._store)
            found, stored = preparer.stored_features(source, reference.uri.rpartition("/")[0])
        except RowError as error:
            msg = f"{lost}; it cannot be made again: {error}"
            raise StoreError(msg) from error
        if number >= len(stored) or not _same(stored[number], reference):
            msg = f"{lost}; made again from {source.name} it is another"
            raise StoreError(msg)
        self.rebuilt += 1
        self._context.journal.event("media_rebuilt", segment=reference.uri, error=str(lost))
        return found[number].array


def _same(one: TensorRef, other: TensorRef) -> bool:
    return (one.uri, one.xxh3_128, one.shape, one.dtype) == (other.uri, other.xxh3_128, other.shape, other.dtype)
