"""Weight names that SGLang expects: those of a Hugging Face checkpoint, or its own where these differ.

transformers 5 holds the experts of a layer as one tensor. SGLang ignores that name with only a line in its log; in a
checkpoint each expert has tensors of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

_GATE_UP, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


def to_checkpoint_names(tensors: Mapping[str, Tensor], prefixes: Sequence[tuple[str, str]] = ()) -> dict[str, Tensor]:
    """Return weights by the names that SGLang expects, without copies.

    Args:
        tensors: by the names in transformers. Experts are one tensor per layer (`gate_up_proj` `[experts, 2 * width,
            hidden]`, `down_proj` `[experts, hidden, width]`), or have tensors of their own already.
        prefixes: see `ServedFamily`.
    """
    return {_renamed(name, prefixes): part for item in tensors.items() for name, part in _split_experts(*item)}


def _renamed(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    for before, after in prefixes:
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name


def _split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    for ending, parts in ((_GATE_UP, ("gate", "up")), (_DOWN, ("down",))):
        if name.endswith(ending):
            prefix = name[: name.rindex(".") + 1]
            for number, expert in enumerate(tensor):
                for part, piece in zip(parts, expert.chunk(len(parts)), strict=True):
                    yield f"{prefix}{number}.{part}_proj.weight", piece
            return
    yield name, tensor
