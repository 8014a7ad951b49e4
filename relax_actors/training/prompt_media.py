"""Media of a row as engines get them, from the columns `prompt` and `media`."""

from __future__ import annotations

from broker.codec import Array
from broker.fields import TensorRef
from broker.subjects import RowId
from relax_actors.engines.protocols.media import MediaItem, PromptMedia
from relax_actors.errors import RowError, StoreError
from relax_actors.messages import Media, PreparedPrompt, Prompt
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
        resolve, arrays = self._store.reader(), []
        for number, medium in enumerate(prepared.media):
            try:
                arrays.append(resolve(medium.features))
            except StoreError as error:
                before = sum(other.source == medium.source for other in prepared.media[:number])
                arrays.append(self._rebuild(medium, before, row, error))
        items = tuple(
            MediaItem(
                medium.kind,  # type: ignore[arg-type]
                array,
                medium.grid,
                medium.start,
                medium.tokens,
                medium.seconds_per_grid,
                medium.features,
            )
            for medium, array in zip(prepared.media, arrays, strict=True)
        )
        return PromptMedia(items, prepared.positions, prepared.position_delta)

    def _rebuild(self, medium: Media, number: int, row: RowId, lost: StoreError) -> Array:
        """Make the segment of a medium again, and return the array `number` of its file."""
        from relax_actors.training.media_preparer import MediaPreparer  # noqa: PLC0415 hardly ever needed

        reference, table = medium.features, self._context.table
        prompt = table.fetch(table.subject(row, "prompt"), Prompt)
        if prompt is None or medium.source >= len(prompt.media):
            raise lost
        try:
            preparer = MediaPreparer(self._context.config, self._store)
            folder = reference.uri.rpartition("/")[0]
            found, stored = preparer.stored_features(prompt.media[medium.source], folder)
        except RowError as error:
            msg = f"{lost}; it cannot be made again: {error}"
            raise StoreError(msg) from error
        if number >= len(stored) or not _same(stored[number], reference):
            msg = f"{lost}; made again from {prompt.media[medium.source].name} it is another"
            raise StoreError(msg)
        self.rebuilt += 1
        self._context.journal.event("media_rebuilt", segment=reference.uri, error=str(lost))
        return found[number].array


def _same(one: TensorRef, other: TensorRef) -> bool:
    return (one.uri, one.xxh3_128, one.shape, one.dtype) == (other.uri, other.xxh3_128, other.shape, other.dtype)
