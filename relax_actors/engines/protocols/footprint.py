"""Processes, GPUs and memory that the actors of an engine need, by estimate."""

from __future__ import annotations

from dataclasses import dataclass

from relax_actors.config import Config

PROCESS_BYTES = 700 << 20
"""Memory of a process with torch, besides the model."""
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a weight, by precision."""
STATE_BYTES = 8
"""Bytes a parameter of AdamW's state, which is in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one actor of an engine needs.

    Attributes:
        processes: number of processes, with its own.
        process_bytes: memory of each process besides the model; a server counts with its actor.
        parameter_bytes: memory a parameter of all processes together, where the device is the CPU.
        table_bytes: memory a parameter of embeddings and output head beyond `parameter_bytes`.
        node_bytes: bytes of host memory a parameter for copies that all actors of a node share, also with GPUs.
        gpus: GPUs that it computes on where the device is a GPU; 0 if it needs no device.
        computes_on_cpu: whether it also computes on the CPU of a machine with GPUs, where none is free.
        is_required: whether it must have its GPUs, also on a machine without any.
    """

    processes: int = 1
    process_bytes: int = PROCESS_BYTES
    parameter_bytes: float = 0
    table_bytes: float = 0
    node_bytes: float = 0
    gpus: int = 1
    computes_on_cpu: bool = True
    is_required: bool = False


ADAPTER_SHARE = 0.05
"""Parameters of an adapter, as a share of those of its model; rank 16 of a model with 0.5 B parameters has 0.018."""


def served_bytes(config: Config) -> int:
    """Return the bytes a parameter of an inference server's weights."""
    dtype = config.rollout.sglang.dtype
    return WEIGHT_BYTES[config.trainer.precision if dtype == "auto" else dtype]


def follower_bytes(config: Config) -> float:
    """Return the bytes a parameter of an engine that follows the trainer: the weights in use and the next ones.

    Of an adapter's versions the base is part only once.
    """
    if config.lora is not None:
        return WEIGHT_BYTES["float32"] * (1 + 2 * ADAPTER_SHARE)
    return 2 * WEIGHT_BYTES["float32"]


def held_copies(config: Config) -> int:
    """Return how many versions a node holds for its inference servers: that in use, the next, and its successor."""
    return 3 if config.staleness.max else 2


def node_copy_bytes(config: Config) -> int:
    """Return the bytes a parameter of the copies that the actors of a node share: of the version in use and the next.

    Engines in the process of an actor need them as the base of deltas alone.
    """
    return 2 * WEIGHT_BYTES[config.trainer.precision] if config.publishes_deltas else 0


def trained_bytes(config: Config, ranks: int = 1, *, offload: bool = False) -> float:
    """Return the bytes a parameter of a model in training: frozen but for its adapter, or trained as a whole.

    Ranks share the model, in float32, as one with `offload` does; each has the whole adapter.
    """
    if config.lora is None:
        return TRAINED_BYTES
    precision = config.trainer.precision if ranks == 1 and not offload else "float32"
    return WEIGHT_BYTES[precision] + ranks * ADAPTER_SHARE * TRAINED_BYTES


TRAINED_BYTES = 2 * WEIGHT_BYTES["float32"] + STATE_BYTES
"""Bytes a parameter of a model that is trained in float32: weights, gradients and the state of AdamW."""
