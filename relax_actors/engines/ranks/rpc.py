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

    Media that sequences share, and items that media share, are encoded once.
    """
    shared = {id(sample.media): sample.media for sample in samples if sample.media is not None}
    items = {id(item): item for media in shared.values() for item in media.items}
    media_number = {key: i for i, key in enumerate(shared)}
    item_number = {key: i for i, key in enumerate(items)}
    packed = [
        {name: value for name in _SAMPLE_FIELDS if (value := getattr(sample, name)) is not None}
        | ({} if sample.media is None else {"media": media_number[id(sample.media)]})
        for sample in samples
    ]
    media = [
        {
            "items": [item_number[id(item)] for item in one.items],
            "positions": one.positions,
            "position_delta": float(one.position_delta),
        }
        for one in shared.values()
    ]
    # References into the store are for other engines.
    features = [{name: getattr(item, name) for name in _ITEM_FIELDS} for item in items.values()]
    return {"samples": packed, "media": media, "items": features}


def unpack_samples(message: Mapping[str, Any]) -> list[TrainSample]:
    """Decode what `pack_samples` encoded; sequences share media as before."""
    items = [MediaItem(**values) for values in message["items"]]
    media = [
        PromptMedia(tuple(items[i] for i in packed["items"]), packed["positions"], packed["position_delta"])
        for packed in message["media"]
    ]
    return [
        TrainSample(**(values | ({"media": media[values["media"]]} if "media" in values else {})))
        for values in message["samples"]
    ]


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
