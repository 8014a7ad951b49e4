"""Arguments, results and errors of the calls from an engine to its ranks, as plain data."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from relax_actors.engines.protocols.sequences import Sequences
from relax_actors.engines.protocols.training import TrainBatch
from relax_actors.errors import ConfigError, RelaxError, StoreError

_ERROR_TYPES: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ConfigError, StoreError, FloatingPointError, ValueError, LookupError)
}


def pack_sequences(sequences: Sequences) -> dict[str, Any]:
    """Encode sequences as plain data."""
    experts = None if sequences.experts is None else list(sequences.experts)
    return {"prompts": list(sequences.prompts), "completions": list(sequences.completions), "experts": experts}


def pack_batch(batch: TrainBatch) -> dict[str, Any]:
    """Encode a batch as plain data."""
    proximal, reference = batch.proximal_logprobs, batch.reference_logprobs
    return {
        "sequences": pack_sequences(batch.sequences),
        "old_logprobs": list(batch.old_logprobs),
        "advantages": batch.advantages,
        "proximal_logprobs": None if proximal is None else list(proximal),
        "reference_logprobs": None if reference is None else list(reference),
        "samples": list(batch.samples),
    }


def unpack_batch(message: dict[str, Any]) -> TrainBatch:
    """Decode what `pack_batch` encoded."""
    return TrainBatch(**message | {"sequences": Sequences(**message["sequences"])})


def pack_error(error: BaseException) -> dict[str, Any]:
    """Encode an error as plain data."""
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "errno": error.errno if isinstance(error, OSError) else None,
        "traceback": "".join(traceback.format_exception(error)),
    }


def unpack_error(message: Mapping[str, Any], rank: int) -> Exception:
    """Exception to raise for a rank's error; keeps the types that the trainer handles differently."""
    if message["errno"] is not None:
        return OSError(message["errno"], f"rank {rank}: {message['text']}")
    kind = _ERROR_TYPES.get(message["kind"])
    if kind is not None:
        return kind(f"rank {rank}: {message['text']}")
    return RankError(f"rank {rank} failed: {message['traceback']}")


class RankError(RelaxError):
    """A rank of the trainer failed or exited."""
