"""Rank of a Megatron trainer in which pickling is an error: `relax_actors.engines.ranks.rank`, guarded."""

from __future__ import annotations

import pickle
from typing import Any, NoReturn

import torch
from torch.distributed import distributed_c10d

from relax_actors.engines.ranks import rank


def _refuse(*_: Any, **__: Any) -> NoReturn:
    msg = "a rank pickles an object"
    raise AssertionError(msg)


def guard() -> None:
    """Make torch's collectives of objects, `torch.save`, `torch.load` and `pickle` raise."""
    for name in ("_object_to_tensor", "_tensor_to_object"):
        if not hasattr(distributed_c10d, name):
            msg = f"torch.distributed has no {name} any more; guard what its collectives of objects call instead"
            raise AttributeError(msg)
        setattr(distributed_c10d, name, _refuse)
    for module, names in ((torch, ("save", "load")), (pickle, ("dump", "dumps", "load", "loads", "Pickler"))):
        for name in names:
            setattr(module, name, _refuse)


if __name__ == "__main__":
    guard()
    rank.main()
