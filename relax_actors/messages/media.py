"""Media of a prompt: named by the row (`MediaSource`), or prepared (`PreparedPrompt`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from broker.fields import TensorRef

Array = NDArray[Any]
Kind = Literal["image", "video", "audio"]
KINDS_OF_MEDIA: tuple[Kind, Kind, Kind] = ("image", "video", "audio")
IMAGE, VIDEO, AUDIO = KINDS_OF_MEDIA
_AXES = 3
"""Rotary positions of a token: time, height, width."""


def _check_kind(kind: str) -> None:
    if kind not in KINDS_OF_MEDIA:
        msg = f"{kind[:80]!r} is no kind of media; the kinds are {', '.join(KINDS_OF_MEDIA)}"
        raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class MediaSource:
    """An image, a video or a sound of a prompt: where its file is, and what the file must hold.

    A reward function gets it in `prompt.media`; `path` is then a file that it can open.

    Attributes:
        kind: one of `KINDS_OF_MEDIA`.
        path: absolute path; path in the store if `stored`.
        xxh3_128: checksum of the file, hexadecimal; empty for a URL that the data fixes with a SHA-256.
        sha256: SHA-256 of the file, hexadecimal, of a URL that the data fixes with it; else empty.
        size: bytes of the file; 0 for a URL.
        stored: whether the file is in the store: bytes of the data, or the download of `url`.
        url: address that the role `media` downloads the file from; empty if there is none.
        start: first second of a video or sound to use; None for its beginning.
        end: last second to use; None for its end.
        options: settings of this medium that replace those of its kind in [media], e.g. `max_pixels`; of a video
            `audio`, whether its sound is used.
        origin: row of the data, for errors.

    Raises:
        ValueError: unknown kind, neither a checksum nor a SHA-256, or a range of seconds that is none.
    """

    kind: str
    path: str
    xxh3_128: str = ""
    sha256: str = ""
    size: int = 0
    stored: bool = False
    url: str = ""
    start: float | None = None
    end: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    origin: str = ""

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        if not (self.xxh3_128 or self.sha256):
            msg = f"{self.kind} {self.name[:200]} has no checksum"
            raise ValueError(msg)
        first, last = self.start or 0.0, math.inf if self.end is None else self.end
        if not 0 <= first < last:
            msg = f"seconds {self.start} to {self.end} of {self.kind} {self.name[:200]} are no range"
            raise ValueError(msg)

    @property
    def name(self) -> str:
        """What the data calls the file: its URL or path."""
        return self.url or self.path

    @property
    def digest(self) -> str:
        """Hash that identifies the content of the file."""
        return self.xxh3_128 or self.sha256


@dataclass(frozen=True, slots=True)
class Media:
    """Features of a medium, as the towers of the model read them.

    A video whose sound is used has two: its frames, then its sound.

    Attributes:
        kind: one of `KINDS_OF_MEDIA`.
        source: number of the medium in `Prompt.media`.
        features: `[t*h*w, channels*patch*patch] uint8` patches, or `[mel, frames] float32` of a sound.
        grid: `[3] int32`, patches in time, height and width; of a sound `[1] int32`, its frames.
        start: index of its first token in the prompt.
        tokens: number of its placeholder tokens.
        seconds_per_grid: seconds between two patches of a video in time; 0 for other kinds.
        inside: whether this is the sound of the video before it.
        seconds: duration of a video or sound as it was used; 0 for an image.
        version: version of the preprocessing.

    Raises:
        ValueError: unknown kind, a grid that does not fit the kind, or a negative number.
    """

    kind: str
    source: int
    features: TensorRef
    grid: Array
    start: int
    tokens: int
    seconds_per_grid: float = 0.0
    inside: bool = False
    seconds: float = 0.0
    version: int = 1

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        expected = (_AXES,) if self.visual else (1,)
        if self.grid.shape != expected or self.grid.dtype != np.int32 or (self.grid < 1).any():
            actual = f"{self.grid.dtype}{list(self.grid.shape)}"
            msg = f"grid of {self.kind} features is {actual}, not {list(expected)} int32 above 0"
            raise ValueError(msg)
        if min(self.source, self.start, self.tokens) < 0 or not math.isfinite(self.seconds_per_grid + self.seconds):
            msg = f"source {self.source}, start {self.start} or tokens {self.tokens} of {self.kind} features is wrong"
            raise ValueError(msg)

    @property
    def visual(self) -> bool:
        """Whether the features are patches of an image or a video, not those of a sound."""
        return self.kind != AUDIO


@dataclass(frozen=True, slots=True)
class ObservedMedia:
    """Media of an observation, which a sequence reads between two turns of the model.

    Attributes:
        start: index in the sequence of the observation's first token.
        sources: files of the media, in the store.
        media: features, in the order of `sources`; `Media.start` counts from the observation's first token, and
            `Media.source` is the number in `sources`.
        positions: `[3, tokens]` rotary positions of the observation's tokens, as `PreparedPrompt.positions`.

    Raises:
        ValueError: shapes do not match, or the tokens of a medium reach beyond the observation.
    """

    start: int
    sources: list[MediaSource]
    media: list[Media]
    positions: Array

    def __post_init__(self) -> None:
        _check_positions(self.positions, f"of an observation at token {self.start}")
        _check_within(self.media, self.positions.shape[1], "an observation")
        if self.start < 0 or any(medium.source >= len(self.sources) for medium in self.media):
            msg = f"an observation at token {self.start} with {len(self.sources)} files names one that it does not have"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """Column `media`: a prompt as a multimodal model reads it, with its placeholders expanded.

    Attributes:
        tokens: `[prompt_len] int32`, the prompt with as many placeholder tokens as each medium takes.
        media: features in the order of the prompt's media.
        positions: `[3, prompt_len] int32`, rotary positions in time, height and width; float32 where the model places
            frames between whole numbers (Qwen3-Omni).
        position_delta: what to add to the index of a token after the prompt to get its position on all axes.

    Raises:
        ValueError: shapes do not match, or the tokens of a medium reach beyond the prompt.
    """

    tokens: Array
    media: list[Media]
    positions: Array
    position_delta: float

    def __post_init__(self) -> None:
        tokens, positions = self.tokens, self.positions
        if tokens.ndim != 1 or tokens.dtype != np.int32 or not len(tokens):
            msg = f"tokens of a prepared prompt are {tokens.dtype}{list(tokens.shape)}, not [prompt_len] int32"
            raise ValueError(msg)
        _check_positions(positions, "of a prepared prompt", len(tokens))
        if not math.isfinite(self.position_delta):
            msg = "a rotary position of a prepared prompt is not finite"
            raise ValueError(msg)
        _check_within(self.media, len(tokens), "a prompt")


def _check_positions(positions: Array, what: str, tokens: int | None = None) -> None:
    expected = (_AXES, positions.shape[-1] if tokens is None and positions.ndim else tokens)
    if positions.shape != expected or positions.dtype not in (np.int32, np.float32):
        shape, length = list(positions.shape), "n" if tokens is None else tokens
        msg = f"positions {what} are {positions.dtype}{shape}, not [{_AXES}, {length}] int32 or float32"
        raise ValueError(msg)
    if not np.isfinite(positions).all():
        msg = f"a rotary position {what} is not finite"
        raise ValueError(msg)


def _check_within(media: list[Media], tokens: int, what: str) -> None:
    for medium in media:
        if (end := medium.start + medium.tokens) > tokens:
            msg = f"tokens {medium.start} to {end} of {medium.kind} reach beyond {what} of {tokens} tokens"
            raise ValueError(msg)
