"""Processes write one safetensors file together, whose bytes do not depend on how many they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from relax_actors.weights import files as weights
from relax_actors.weights import part_files
from relax_actors.weights.part_files import Part

TENSORS = {
    "matrix": torch.arange(35, dtype=torch.float32).view(5, 7),
    "half": torch.arange(9, dtype=torch.bfloat16).view(3, 3, 1),
    "row": torch.arange(2, dtype=torch.float32),
    "count": torch.tensor(3.0),
    "none": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
}


def parts_of(rank: int, ranks: int) -> dict[str, Part]:
    """Share the rows of all tensors; those without rows belong to rank 0."""

    def part(tensor: Tensor) -> Part:
        if tensor.dim() == 0:
            return Part(tensor if rank == 0 else tensor.new_empty(0), ())
        most = -(-len(tensor) // ranks)
        first = min(len(tensor), rank * most)
        return Part(tensor[first : first + most], tuple(tensor.shape), first)

    return {name: part(tensor) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_all_ranks_are_one_file_in_any_order(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "together"
    for rank in reversed(range(ranks)):
        part_files.save(parts_of(rank, ranks), path)
    found = weights.load([path])
    assert weights.fingerprint(found) == weights.fingerprint(TENSORS)
    part_files.save(parts_of(0, 1), tmp_path / "alone")
    assert path.read_bytes() == (tmp_path / "alone").read_bytes()


def test_a_longer_file_of_before_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    part_files.save(parts_of(0, 1), path)
    assert weights.fingerprint(weights.load([path])) == weights.fingerprint(TENSORS)


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        part_files.save(parts_of(0, 1), tmp_path / "nowhere" / "file")
