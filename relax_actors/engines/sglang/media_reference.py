"""Media of a prompt as a request names them: where their features lie in the store, and the prompt's positions.

The server maps the files; it neither decodes nor resizes anything, and reads the token ids as they are.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from broker.fields import TensorRef
from relax_actors.engines.protocols.media import MediaItem, PromptMedia
from relax_actors.errors import EngineError
from relax_actors.media.family import Family

PREFIX = "relax-media:"
"""Begins the string that stands for all media of a prompt."""
BARRED = -1e9
"""Added to the logits of barred ids: their probability is 0 in float32, and JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Features of one medium, in a file.

    Attributes:
        kind: "image", "video" or "audio".
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
        """Map the features.

        Raises:
            ValueError: the file is gone, or was changed.
        """
        reference = self.features
        try:
            found: NDArray[Any] = np.memmap(
                self.path, np.dtype(reference.dtype), "r", reference.offset, tuple(reference.shape)
            )
        except (OSError, ValueError) as error:
            msg = f"features of {self.kind} at {self.path} cannot be read: {error}"
            raise ValueError(msg) from error
        if xxhash.xxh3_128_hexdigest(found.data) != reference.xxh3_128:
            msg = f"features of {self.kind} at {self.path} have changed"
            raise ValueError(msg)
        return found


@dataclass(frozen=True, slots=True)
class StoredMedia:
    """All media of a prompt.

    Attributes:
        items: media in the order of their first placeholders.
        positions: `[3, prompt_len]`, as in `PromptMedia`.
        delta: `PromptMedia.position_delta`.
        mean: mean of each channel of pixels, between 0 and 1.
        std: standard deviation of each channel.
        temporal: frames of a patch.
    """

    items: tuple[StoredItem, ...]
    positions: NDArray[Any]
    delta: float
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    temporal: int = 1

    def encode(self) -> str:
        """Return the string that a request carries."""
        items = [
            [one.kind, one.path, _plain(one.features), list(one.grid), [list(run) for run in one.runs], one.padding]
            for one in self.items
        ]
        positions = np.ascontiguousarray(self.positions)
        packed = base64.b64encode(zlib.compress(positions.tobytes(), 1)).decode()
        body = [items, packed, positions.dtype.name, self.delta, self.mean, self.std, self.temporal]
        return PREFIX + json.dumps(body, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> StoredMedia:
        """Read the string of a request.

        Raises:
            ValueError: it is not one that `encode` returned.
        """
        if not text.startswith(PREFIX):
            msg = f"{text[:80]!r} is no reference to the media of a run"
            raise ValueError(msg)
        items, packed, dtype, delta, mean, std, temporal = json.loads(text.removeprefix(PREFIX))
        stored = tuple(
            StoredItem(
                kind, path, TensorRef(*place), tuple(grid), tuple((first, last) for first, last in runs), padding
            )
            for kind, path, place, grid, runs, padding in items
        )
        positions = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.dtype(dtype)).reshape(3, -1)
        return cls(stored, positions, delta, tuple(mean), tuple(std), temporal)


def _plain(reference: TensorRef) -> list[Any]:
    place = [reference.uri, reference.offset, reference.nbytes, reference.dtype]
    return [*place, list(reference.shape), reference.xxh3_128]


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
    """Makes the references of requests.

    Args:
        family: family of the model.
        store: folder of the run's store.
    """

    def __init__(self, family: Family, store: Path) -> None:
        self._family, self._store = family, store
        self._logit_bias = {str(token): BARRED for token in family.barred}

    def of(self, tokens: NDArray[Any], media: PromptMedia | None) -> RequestMedia:
        """Return what the requests of a prompt add.

        Raises:
            EngineError: the placeholders of the prompt do not fit its media, or its features are not in the store.
        """
        if media is None or not media.items:
            return RequestMedia(None, self._logit_bias)
        vision = self._family.vision
        pixels = (vision.mean, vision.std, vision.temporal) if vision is not None else ()
        stored = StoredMedia(tuple(self._items(tokens, media)), media.positions, media.position_delta, *pixels)
        return RequestMedia(stored.encode(), self._logit_bias)

    def _items(self, tokens: NDArray[Any], media: PromptMedia) -> Iterator[StoredItem]:
        at = {kind: np.flatnonzero(tokens == token) for kind, token in self._placeholders()}
        padding = self._padding(media.of_kind("audio"))
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
            padded = padding if item.kind == "audio" else 0
            grid = tuple(int(size) for size in item.grid)
            yield StoredItem(item.kind, path, item.reference, grid, _runs(mine), padded)

    def _placeholders(self) -> list[tuple[str, int]]:
        return [(kind, self._family.token(kind)) for kind in self._family.kinds]

    def _padding(self, sounds: Sequence[MediaItem]) -> int:
        """Return the frames of the longest chunk of a prompt's sounds, to which its model pads them all."""
        chunk = self._family.audio.chunk if self._family.audio is not None else 0
        return max((min(int(sound.grid[0]), chunk) for sound in sounds), default=0)


def _runs(indices: NDArray[Any]) -> tuple[tuple[int, int], ...]:
    """Return the first and the last of each run of consecutive indices."""
    pieces = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    return tuple((int(piece[0]), int(piece[-1])) for piece in pieces)
