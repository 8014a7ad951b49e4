"""Checkpoints: each rank writes its shards, any layout loads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from relax_actors.algorithms.controllers import Coefficients
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore.optimizer import Optimizer
from relax_actors.engines.megatron.mcore.rank_weights import RankWeights
from relax_actors.engines.megatron.mcore.shard_files import LocalShard, Piece, stored_pieces, writer
from relax_actors.engines.torch.background import run_in_background
from relax_actors.engines.torch.loss_scale import LossScale
from relax_actors.weights import files as weights

STATE, REFERENCE, PARAMETER = "state", "reference", "param"


@dataclass(frozen=True, slots=True)
class RankState:
    """State of this rank's part of a model: weights, optimizer, and the reference of the KL penalty.

    Attributes:
        layout: of the ranks.
        weights: weights that are trained, and others that are saved with them.
        optimizer: optimizer of the trained weights.
        reference: weights of the reference by key; empty if there is none, or if it has no weights of its own.
    """

    layout: Layout
    weights: RankWeights
    optimizer: Optimizer
    reference: Mapping[str, LocalShard] = field(default_factory=dict)

    def pieces(self) -> Iterator[Piece]:
        """Pieces that this rank writes. All ranks together write every number once."""
        mine = self.weights
        for slot in self.optimizer.slots():
            key = mine.key_of(slot.parameter)
            if mine.is_first_copy(key) if slot.is_shared_out else mine.keeps(key):
                state = {name: tensor for name, tensor in slot.state.items() if name != "step"}
                step = float(slot.state["step"]) if "step" in slot.state else None
                yield Piece(key, mine.local[key], slot.span.start, {PARAMETER: slot.main, **state}, step)
        for key, local in mine.local.items():
            if not local.parameter.requires_grad and mine.keeps(key):
                yield Piece(key, local, 0, {PARAMETER: local.parameter})
        for key, local in self.reference.items():
            if mine.keeps(key):
                yield Piece(key, local, 0, {REFERENCE: local.parameter})


def save(folder: Path, state: RankState, coefficients: Coefficients | None = None) -> None:
    """Write weights, optimizer state and reference to a folder; every rank must call it.

    The checkpoint is complete when all ranks have returned.

    Raises:
        OSError: writing failed; errno is ENOSPC if the disk is full.
    """
    write = writer(state.pieces(), distributed.get_rank(), copies=False)
    write(_prepare(folder, state, coefficients))


def begin_save(folder: Path, state: RankState, coefficients: Coefficients | None = None) -> Callable[[], None]:
    """Copy the state and write it in a background thread; every rank must call it.

    Returns:
        Function that waits for this rank's files. The checkpoint is complete when it has returned on all ranks.

    Raises:
        OSError: as in `save`; also raised by the returned function.
    """
    write = writer(state.pieces(), distributed.get_rank(), copies=True)
    return run_in_background(partial(write, _prepare(folder, state, coefficients)))


def _prepare(folder: Path, state: RankState, coefficients: Coefficients | None) -> Path:
    target = folder / STATE
    if distributed.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        metadata = {
            "engine": "megatron",
            "layout": asdict(state.layout),
            "reference": bool(state.reference),
            "updates": state.optimizer.updates,
            "group_step": state.optimizer.group_step,
            "loss_scale": asdict(state.optimizer.loss_scale),
            "coefficients": None if coefficients is None else asdict(coefficients),
        }
        (folder / weights.ENGINE).write_text(json.dumps(metadata))
    distributed.barrier()
    return target


def has_reference(folder: Path) -> bool:
    """Whether a checkpoint contains weights of the reference of the KL penalty."""
    return bool(_metadata(folder)["reference"])


def coefficients_of(folder: Path) -> Coefficients:
    """Coefficients of the step after a checkpoint of a trainer."""
    return Coefficients(**_metadata(folder)["coefficients"])


@torch.no_grad()
def load(folder: Path, state: RankState) -> None:
    """Load what `save` wrote, with any layout; raises ValueError if the checkpoint lacks a part of this model."""
    mine = state.weights
    with stored_pieces(folder / STATE) as stored:
        for key, local in mine.local.items():
            local.parameter.copy_(stored.read(PARAMETER, mine.stored_key(key), local).view_as(local.parameter))
        for slot in state.optimizer.slots():
            key = mine.key_of(slot.parameter)
            local, name = mine.local[key], mine.stored_key(key)
            read = partial(stored.read, key=name, local=local, span=slot.span)
            slot.main.copy_(read(PARAMETER).view_as(slot.main))
            slot.state.clear()
            for moment in ("exp_avg", "exp_avg_sq"):
                if stored.has(moment, name):
                    slot.state[moment] = read(moment).to(slot.main.device).view_as(slot.main).clone()
            if (step := stored.step(name)) is not None:
                slot.state["step"] = torch.tensor(step)
        for key, local in state.reference.items():
            local.parameter.copy_(stored.read(REFERENCE, mine.stored_key(key), local).view_as(local.parameter))
    metadata = _metadata(folder)
    state.optimizer.group_step = metadata["group_step"]
    state.optimizer.loss_scale = LossScale(**metadata["loss_scale"])
    # Only dropped inputs of an adapter depend on it; checkpoints without it hold no adapter.
    state.optimizer.updates = metadata.get("updates", 0)
    state.optimizer.invalidate()


def _metadata(folder: Path) -> Any:
    return json.loads((folder / weights.ENGINE).read_text())
