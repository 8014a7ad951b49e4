"""Media of a prompt as a request names them: where their features lie in the store, and the prompt's positions.

The server maps the files; it neither decodes nor resizes anything, and reads the token ids as they are.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from broker.fields import TensorRef
from relax_actors.engines.protocols.media import MediaItem, PromptMedia
from relax_actors.errors import EngineError
from relax_actors.media.families import VisionSpec
from relax_actors.media.family import Family

PREFIX = "relax-media:"
"""Begins the string that stands for all media of a prompt."""
BARRED = -1e9
"""Added to the logits of barred ids: their probability is 0 in float32, and JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Features of one medium, in a file.

    Attributes:
        kind: one of `KINDS_OF_MEDIA`.
        path: file that holds the features.
        features: place of the array in the file.
        grid: as in `MediaItem`.
        runs: first and last index of each run of its placeholders.
        padding: frames to which the model pads the sounds of this prompt; 0 for other media.
    """

    kind: str
    path: str
    features: TensorRef
    grid: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    padding: int = 0

    def read(self) -> NDArray[Any]:
        """Map the features; raises ValueError if the file is gone, or was changed."""
        reference = self.features
        try:
            array: NDArray[Any] = np.memmap(
                self.path, np.dtype(reference.dtype), "r", reference.offset, tuple(reference.shape)
            )
        except (OSError, ValueError) as error:
            msg = f"features of {self.kind} at {self.path} cannot be read: {error}"
            raise ValueError(msg) from error
        if xxhash.xxh3_128_hexdigest(array.data) != reference.xxh3_128:
            msg = f"features of {self.kind} at {self.path} have changed"
            raise ValueError(msg)
        return array


def _pack(positions: NDArray[Any]) -> list[str]:
    content = zlib.compress(np.ascontiguousarray(positions).tobytes(), 1)
    return [positions.dtype.name, base64.b64encode(content).decode()]


def _unpack(packed: list[str]) -> NDArray[Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(packed[1])), np.dtype(packed[0])).reshape(3, -1)


@dataclass(frozen=True, slots=True)
class StoredMedia:
    """All media of a prompt.

    Attributes:
        items: media in the order of their first placeholders.
        positions: `[3, prompt_len]`, as in `PromptMedia`.
        delta: `PromptMedia.position_delta`.
        vision: patches of the model, if it sees.
    """

    items: tuple[StoredItem, ...]
    positions: Annotated[NDArray[Any], PlainValidator(_unpack), PlainSerializer(_pack)]
    delta: float
    vision: VisionSpec | None = None

    def encode(self) -> str:
        """Return the string that a request carries."""
        return PREFIX + _MEDIA.dump_json(self).decode()

    @classmethod
    def decode(cls, text: str) -> StoredMedia:
        """Read the string of a request; raises ValueError if `encode` did not return it."""
        if not text.startswith(PREFIX):
            msg = f"{text[:80]!r} is no reference to the media of a run"
            raise ValueError(msg)
        return _MEDIA.validate_json(text.removeprefix(PREFIX))


_MEDIA = TypeAdapter(StoredMedia)


@dataclass(frozen=True, slots=True)
class RequestMedia:
    """What a request to a multimodal model adds to its prompt and sampling parameters.

    Attributes:
        reference: string that stands for the media of the prompt; None for a prompt of text alone.
        logit_bias: keeps the server from sampling barred ids; log-probs are of the distribution without them.
    """

    reference: str | None
    logit_bias: dict[str, float]


class MediaReferences:
    """Makes the references of requests."""

    def __init__(self, family: Family, store: Path) -> None:
        self._family, self._store = family, store
        self._logit_bias = {str(token): BARRED for token in family.barred}

    def of(self, tokens: NDArray[Any], media: PromptMedia | None) -> RequestMedia:
        """Return what the requests of a prompt add; raises EngineError if its media do not fit, or are lost."""
        if media is None or not media.items:
            return RequestMedia(None, self._logit_bias)
        items = tuple(self._items(tokens, media))
        stored = StoredMedia(items, media.positions, media.position_delta, self._family.vision)
        return RequestMedia(stored.encode(), self._logit_bias)

    def _items(self, tokens: NDArray[Any], media: PromptMedia) -> Iterator[StoredItem]:
        at = {kind: np.flatnonzero(tokens == self._family.ids[kind]) for kind in self._family.kinds}
        padding = self._padding([item for item in media.items if not item.visual])
        for item in media.items:
            mine, at[item.kind] = at[item.kind][: item.tokens], at[item.kind][item.tokens :]
            if len(mine) < item.tokens:
                msg = (
                    f"a prompt has {len(mine)} placeholders for an item of kind {item.kind} with {item.tokens} tokens; "
                    "it was prepared for another prompt or another model"
                )
                raise EngineError(msg)
            if item.reference is None:
                msg = f"features of an item of kind {item.kind} are not in the store; a server reads them from there"
                raise EngineError(msg)
            path = str(self._store / item.reference.uri)
            padded = 0 if item.visual else padding
            grid = tuple(int(size) for size in item.grid)
            yield StoredItem(item.kind, path, item.reference, grid, _runs(mine), padded)

    def _padding(self, sounds: Sequence[MediaItem]) -> int:
        """Return the frames of the longest chunk of a prompt's sounds, to which its model pads them all."""
        chunk = self._family.audio.chunk if self._family.audio is not None else 0
        return max((min(int(sound.grid[0]), chunk) for sound in sounds), default=0)


def _runs(indices: NDArray[Any]) -> tuple[tuple[int, int], ...]:
    """Return the first and the last of each run of consecutive indices."""
    pieces = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    return tuple((int(piece[0]), int(piece[-1])) for piece in pieces)
