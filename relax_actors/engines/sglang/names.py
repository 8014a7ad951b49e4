"""The names that SGLang knows weights by: those of a Hugging Face folder on disk.

transformers 5 holds the experts of a layer as one tensor, under a name that SGLang passes over with no more than a line
in its log; on disk, as on the hub, each expert is on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

_GATE_UP, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


def on_disk(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by their names on disk; no copies.

    Args:
        tensors: by the names that transformers gives them: experts in one tensor a layer (`gate_up_proj` `[experts, 2
            * width, hidden]`, `down_proj` `[experts, hidden, width]`), or on their own already.
    """
    return {name: part for whole in tensors.items() for name, part in _apart(*whole)}


def _apart(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    for ending, parts in ((_GATE_UP, ("gate", "up")), (_DOWN, ("down",))):
        if name.endswith(ending):
            before = name[: name.rindex(".") + 1]
            for number, expert in enumerate(tensor):
                for part, piece in zip(parts, expert.chunk(len(parts)), strict=True):
                    yield f"{before}{number}.{part}_proj.weight", piece
            return
    yield name, tensor
