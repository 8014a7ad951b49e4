"""Media of rows for roles that compute with the model; nothing for a text model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from broker.codec import Array
from broker.fields import TensorRef
from broker.subjects import RowId
from relax_actors.config import Config
from relax_actors.engines.protocols.media import MediaItem, PromptMedia, items_of
from relax_actors.errors import RelaxError, RowError, StoreError
from relax_actors.media.family import Family, family_of
from relax_actors.messages import (
    KINDS_OF_MEDIA,
    Media,
    MediaSource,
    ObservedMedia,
    PreparedPrompt,
    Prompt,
    Trajectory,
)
from relax_actors.messages.media import VIDEO
from relax_actors.runtime import Context, Row
from relax_actors.runtime.cells import read_column

MEDIA = "media"
"""Column of the expanded prompt and its media."""


def with_media(columns: tuple[str, ...], config: Config) -> tuple[str, ...]:
    """Return the columns to read, with `media` if prompts have media.

    Where rows come from data, the trajectory holds the media.
    """
    return columns if config.media is None or config.from_data else (*columns, MEDIA)


class RowMedia:
    """Reads the column `media` of rows, and the media that their sequences read after it.

    A lost or damaged segment of the store is made again from the raw file.

    Attributes:
        none: media of no tokens.
        rebuilt: segments that were made again.
    """

    def __init__(self, context: Context) -> None:
        self._context, self._table = context, context.table
        self._family, self.rebuilt = family_of(context.config.model_path), 0
        self._has_prompts = not context.config.from_data
        self.none = PromptMedia.none("int32" if self._family is None else self._family.position_dtype)

    def of(self, prepared: PreparedPrompt, row: RowId) -> PromptMedia:
        """Return the media of a row's prompt, one object for all samples; in the role's thread.

        Raises:
            StoreError: a segment is lost, and its raw file, too, or it has changed.
            RowError: the column does not fit the model.
        """
        if self._family is not None and (why := misfit(prepared, self._family)):
            raise RowError(why)
        table = self._table

        def sources() -> list[MediaSource]:
            prompt = table.fetch(table.subject(row, "prompt"), Prompt)
            return [] if prompt is None else prompt.media

        items = items_of(prepared.media, self._arrays(prepared.media, sources))
        return PromptMedia(items, prepared.positions, prepared.position_delta)

    def of_row(self, row: Row) -> list[PromptMedia]:
        """Return the media of each sequence of a row that a role has; see `of_sequences`."""
        return self.of_sequences(row.media if self._has_prompts else None, row.id, row.trajectory)

    def of_sequences(self, prepared: PreparedPrompt | None, row: RowId, trajectory: Trajectory) -> list[PromptMedia]:
        """Return the media of each sequence; `prepared` is None if only the trajectory has media.

        Sequences that share as much of the prompt and read nothing after it get one object; an item that several
        sequences hold at one place is one object: engines encode it once.

        Raises:
            StoreError: a segment is lost, and cannot be made again.
            RowError: the trajectory was sampled from another prompt, a sequence holds a part of a medium, or media do
                not fit the model or the tokens.
        """
        observed = trajectory.observed or [[] for _ in trajectory.lengths]
        follows = [not (seen and seen[0].start == 0) for seen in observed]
        prompt = self.none
        if prepared is not None:
            if any(follows) and not np.array_equal(trajectory.prompt_tokens, prepared.tokens):
                msg = "the trajectory's prompt is not the one in the column media; the rollout must sample from it"
                raise RowError(msg)
            check_shared(prepared, np.unique(trajectory.shared[follows]).tolist())
            prompt = self.of(prepared, row)
        prefixes = {shared: prompt.prefix(shared) for shared in np.unique(trajectory.shared).tolist()}
        known: dict[Any, MediaItem] = {}
        media_of_sequences = []
        for ids, shared, is_after, seen in zip(
            trajectory.iter_tokens(), trajectory.shared.tolist(), follows, observed, strict=True
        ):
            media = prefixes[shared] if is_after else self.none
            if seen:
                media = shared_items(self._observed(media, seen, ids), known)
            media_of_sequences.append(media)
        return media_of_sequences

    def observed(self, before: PromptMedia, observations: Sequence[ObservedMedia]) -> PromptMedia:
        """Return the media of a sequence that has read observations after others, in order.

        Raises:
            StoreError: a segment is lost, and its raw file, too, or it has changed.
        """
        for each in observations:
            arrays = self._arrays(each.media, lambda each=each: each.sources)  # type: ignore[misc]
            before = before.extended(each.start, each.positions, items_of(each.media, arrays))
        return before

    def _observed(self, before: PromptMedia, seen: Sequence[ObservedMedia], tokens: Array) -> PromptMedia:
        for each in seen:
            if each.start < before.positions.shape[1]:
                msg = f"an observation at token {each.start} lies within the prompt of its sequence"
                raise RowError(msg)
            part = tokens[each.start : each.start + each.positions.shape[1]]
            if self._family is not None and (why := misfit(replace(each, start=0), self._family, part)):
                raise RowError(why)
            before = self.observed(before, [each])
        return before

    def _arrays(self, media: Sequence[Media], sources: Callable[[], Sequence[MediaSource]]) -> list[Array]:
        """Return the features of media; `sources` returns their raw files."""
        resolve, arrays = self._table.store.reader(), []
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
            preparer = MediaPreparer(self._context.config, self._table.store)
            features, stored = preparer.stored_features(source, reference.uri.rpartition("/")[0])
        except RowError as error:
            msg = f"{lost}; it cannot be made again: {error}"
            raise StoreError(msg) from error
        if number >= len(stored) or not _is_same(stored[number], reference):
            msg = f"{lost}; made again from {source.name} it is another"
            raise StoreError(msg)
        self.rebuilt += 1
        self._context.journal.event("media_rebuilt", segment=reference.uri, error=str(lost))
        return features[number].array

    def check_sequence(self, prepared: PreparedPrompt, tokens: Array, shared: int) -> None:
        """Check that the model can read a sequence that begins with `shared` tokens of the prompt.

        Raises:
            RowError: it holds a part of a medium, or placeholders of a medium that it does not share with the prompt.
        """
        check_shared(prepared, [shared])
        family = self._family
        if family is not None and np.isin(tokens[shared:], [family.ids[kind] for kind in family.kinds]).any():
            msg = (
                f"a sequence holds placeholders of media after the {shared} tokens that it shares with its prompt; a "
                "sequence with a medium of the prompt must begin with all tokens up to it"
            )
            raise RowError(msg)

    def read(self, rows: list[RowId], trajectories: list[Trajectory | None]) -> list[list[PromptMedia] | RelaxError]:
        """Read the media of sequences; an error in place of media that cannot be read.

        A row whose trajectory could not be read, None, has no media.
        """
        media, cells = list[list[PromptMedia] | RelaxError](), list[Any]([None] * len(rows))
        if self._has_prompts:
            cells = read_column(self._table, rows, MEDIA, PreparedPrompt)
        for row, trajectory, prepared in zip(rows, trajectories, cells, strict=True):
            try:
                if isinstance(prepared, RelaxError):
                    media.append(prepared)
                else:
                    media.append([] if trajectory is None else self.of_sequences(prepared, row, trajectory))
            except RelaxError as error:
                media.append(error)
        return media


def _is_same(one: TensorRef, other: TensorRef) -> bool:
    return (one.uri, one.xxh3_128, one.shape, one.dtype) == (other.uri, other.xxh3_128, other.shape, other.dtype)


def check_shared(prepared: PreparedPrompt, shared_lengths: Iterable[int]) -> None:
    """Check that sequences share the media of their prompt whole or not at all.

    The tokens of a medium need not be contiguous: those of a video alternate with timestamps, or with its sound.

    Raises:
        RowError: a sequence shares a part of a medium.
    """
    for shared in shared_lengths:
        for medium in prepared.media:
            if medium.start < shared < len(prepared.tokens) and medium.tokens:
                placeholders = np.flatnonzero(prepared.tokens == prepared.tokens[medium.start])
                if placeholders[placeholders >= medium.start][medium.tokens - 1] >= shared:
                    msg = (
                        f"a sequence shares {shared} tokens of its prompt, which end within {medium.kind} "
                        f"{medium.source + 1}; a sequence must hold all tokens of a medium, or none"
                    )
                    raise RowError(msg)


def shared_items(media: PromptMedia, known: dict[Any, MediaItem]) -> PromptMedia:
    """Return media with the items of `known` in place of equal ones, and add the others to it."""
    items = tuple(known.setdefault((item.reference, item.start), item) for item in media.items)
    return replace(media, items=items)


def misfit(prepared: PreparedPrompt | ObservedMedia, family: Family, tokens: Array | None = None) -> str:
    """Return why a model cannot read a prepared prompt `[n] int32`; empty if it can.

    Engines would fail with such a row, and with it all rows of its micro-batch.
    """
    what, ids = "an observation", tokens
    if isinstance(prepared, PreparedPrompt):
        what, ids = "column media", prepared.tokens
    for kind in KINDS_OF_MEDIA:
        media = [medium for medium in prepared.media if medium.kind == kind]
        if media and kind not in family.kinds:
            return f"{what} holds {kind} features, and a {family.model_type} model takes none"
        places = int(np.count_nonzero(ids == family.ids[kind])) if kind in family.kinds else 0
        if places != (count := sum(medium.tokens for medium in media)):
            return f"{what} has {places} placeholders of kind {kind} for {count} tokens of its features"
    return next((why for medium in prepared.media if (why := _misfit_of_features(medium, family))), "")


def _misfit_of_features(medium: Media, family: Family) -> str:
    shape, dtype, grid = tuple(medium.features.shape), medium.features.dtype, medium.grid.tolist()
    if not medium.visual and family.audio is not None:
        mels, (frames,) = family.audio.mels, grid
        tokens, wanted = family.audio.tokens(frames), f"float32[{mels}, {frames} or more]"
        fits = dtype == "float32" and len(shape) == 2 and shape[0] == mels and shape[1] >= frames  # noqa: PLR2004
    elif (vision := family.vision) is not None:
        patches, frames = math.prod(grid), vision.temporal if medium.kind == VIDEO else 1
        rows = patches, 3 * frames * vision.patch**2
        tokens, wanted = patches // vision.merge**2, f"uint8{list(rows)}"
        fits = dtype == "uint8" and shape == rows and not any(side % vision.merge for side in grid[1:])
    else:
        return ""
    if fits and medium.tokens == tokens:
        return ""
    return (
        f"{medium.kind} features {dtype}{list(shape)} with {medium.tokens} tokens do not fit their grid {grid}, which "
        f"needs {wanted} and {tokens} tokens"
    )
