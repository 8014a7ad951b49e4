"""What an engine asks of its ranks, as plain data: batches there, results and errors back."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from relax_actors.engines.protocols.sequences import Sequences
from relax_actors.engines.protocols.training import TrainBatch
from relax_actors.errors import ConfigError, RelaxError, StoreError

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ConfigError, StoreError, FloatingPointError, ValueError, LookupError)
}


def plain_sequences(sequences: Sequences) -> dict[str, Any]:
    """Sequences as a message."""
    experts = None if sequences.experts is None else list(sequences.experts)
    return {"prompts": list(sequences.prompts), "completions": list(sequences.completions), "experts": experts}


def plain_batch(batch: TrainBatch) -> dict[str, Any]:
    """A batch as a message."""
    proximal, reference = batch.proximal_logprobs, batch.reference_logprobs
    return {
        "sequences": plain_sequences(batch.sequences),
        "old_logprobs": list(batch.old_logprobs),
        "advantages": batch.advantages,
        "proximal_logprobs": None if proximal is None else list(proximal),
        "reference_logprobs": None if reference is None else list(reference),
        "samples": list(batch.samples),
    }


def batch_of(message: dict[str, Any]) -> TrainBatch:
    """Undoes `plain_batch`."""
    return TrainBatch(**message | {"sequences": Sequences(**message["sequences"])})


def plain_error(error: BaseException) -> dict[str, Any]:
    """An error as a message."""
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "errno": error.errno if isinstance(error, OSError) else None,
        "traceback": "".join(traceback.format_exception(error)),
    }


def error_of(message: Mapping[str, Any], rank: int) -> Exception:
    """What to raise for a rank's error: of the kind that it was where the trainer tells kinds apart."""
    if message["errno"] is not None:
        return OSError(message["errno"], f"rank {rank}: {message['text']}")
    kind = _KINDS.get(message["kind"])
    if kind is not None:
        return kind(f"rank {rank}: {message['text']}")
    return RankError(f"rank {rank} failed: {message['traceback']}")


class RankError(RelaxError):
    """A rank of the trainer failed, or is gone."""
