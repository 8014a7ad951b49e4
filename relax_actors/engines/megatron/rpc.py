"""Arguments, results and errors of the calls from an engine to its ranks, as plain data."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.errors import ConfigError, RelaxError, StoreError

_ERROR_TYPES: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ConfigError, StoreError, FloatingPointError, ValueError, LookupError)
}
_SAMPLE_FIELDS = tuple(field.name for field in fields(TrainSample))


def pack_samples(samples: Sequence[TrainSample]) -> list[dict[str, Any]]:
    """Encode sequences as plain data and arrays; fields that are None are left out."""
    return [
        {name: value for name in _SAMPLE_FIELDS if (value := getattr(sample, name)) is not None} for sample in samples
    ]


def unpack_samples(message: Sequence[Mapping[str, Any]]) -> list[TrainSample]:
    """Decode what `pack_samples` encoded."""
    return [TrainSample(**values) for values in message]


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
