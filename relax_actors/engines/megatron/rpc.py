"""Arguments, results and errors of the calls from an engine to its ranks, as plain data."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from relax_actors.engines.protocols.media import MediaItem, PromptMedia
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.errors import ConfigError, RelaxError, StoreError

_ERROR_TYPES: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ConfigError, StoreError, FloatingPointError, ValueError, LookupError)
}
_SAMPLE_FIELDS = tuple(field.name for field in fields(TrainSample))
_ITEM_FIELDS = tuple(field.name for field in fields(MediaItem) if field.name != "reference")


def pack_samples(samples: Sequence[TrainSample]) -> dict[str, Any]:
    """Encode sequences as plain data and arrays; fields that are None are left out.

    Media that sequences share are encoded once.
    """
    shared = {id(sample.media): sample.media for sample in samples if sample.media is not None}
    number = {key: i for i, key in enumerate(shared)}
    found = [
        {name: value for name in _SAMPLE_FIELDS if (value := getattr(sample, name)) is not None}
        | ({} if sample.media is None else {"media": number[id(sample.media)]})
        for sample in samples
    ]
    return {"samples": found, "media": [_pack_media(media) for media in shared.values()]}


def unpack_samples(message: Mapping[str, Any]) -> list[TrainSample]:
    """Decode what `pack_samples` encoded; sequences share media as before."""
    media = [_unpack_media(packed) for packed in message["media"]]
    return [
        TrainSample(**(values | ({"media": media[values["media"]]} if "media" in values else {})))
        for values in message["samples"]
    ]


def _pack_media(media: PromptMedia) -> dict[str, Any]:
    """Encode the media of a prompt with their features; references into the store are for other engines."""
    items = [{name: getattr(item, name) for name in _ITEM_FIELDS} for item in media.items]
    return {"items": items, "positions": media.positions, "position_delta": float(media.position_delta)}


def _unpack_media(message: Mapping[str, Any]) -> PromptMedia:
    items = tuple(MediaItem(**values) for values in message["items"])
    return PromptMedia(items, message["positions"], message["position_delta"])


def pack_error(error: BaseException) -> dict[str, Any]:
    """Encode an error as plain data."""
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "errno": error.errno if isinstance(error, OSError) else None,
        "traceback": "".join(traceback.format_exception(error)),
    }


def unpack_error(message: Mapping[str, Any], rank: int) -> Exception:
    """Exception to raise for a rank's error, of the same type where the trainer checks it."""
    if message["errno"] is not None:
        return OSError(message["errno"], f"rank {rank}: {message['text']}")
    kind = _ERROR_TYPES.get(message["kind"])
    if kind is not None:
        return kind(f"rank {rank}: {message['text']}")
    return RankError(f"rank {rank} failed: {message['traceback']}")


class RankError(RelaxError):
    """A rank failed or exited."""
