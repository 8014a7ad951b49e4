"""Memory of engines that leaves its device for the disk, on a CPU, where the release is real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from relax_actors.engines.torch.host_memory import MovableStorages, MovableTensors
from relax_actors.runtime.watchdog import resident_mib

LARGE = 16 << 20
"""Numbers of 64 MiB."""


def kinds() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn((3, 5, 7), generator=generator)
    return [
        numbers.clone(),
        numbers.permute(2, 0, 1).clone(memory_format=torch.preserve_format),
        numbers.bfloat16(),
        torch.tensor(3.5),
        torch.empty(0),
        torch.arange(5),
        torch.nn.Parameter(numbers[:1].clone()),
    ]


def test_tensors_are_read_alike_at_both_places_and_keep_their_strides(tmp_path: Path) -> None:
    tensors, expected = kinds(), kinds()
    memory = MovableTensors(lambda: tensors, torch.device("cpu"))
    for _ in range(2):
        size = memory.release(tmp_path)
        assert size == sum(tensor.nbytes for tensor in expected)
        assert memory.release(tmp_path) == 0
        assert all(map(torch.equal, tensors, expected))
        assert memory.resume() == size
        assert memory.resume() == 0
        assert all(map(torch.equal, tensors, expected))
        assert [t.stride() for t in tensors] == [t.stride() for t in expected]
        for tensor in (*tensors, *expected):  # what is written next goes to the disk next
            tensor.detach().mul_(2)
    assert list(tmp_path.iterdir()) == []


def test_storages_return_with_all_views_of_them(tmp_path: Path) -> None:
    buffer = torch.arange(100, dtype=torch.float32)
    views, other = [buffer[10:20].view(2, 5), buffer[::3]], torch.ones(7, dtype=torch.bfloat16)
    expected = [view.clone() for view in views]
    memory = MovableStorages(lambda: [views[0], buffer], lambda: [other])
    assert memory.release(tmp_path) == 400 + 14
    assert [t.untyped_storage().nbytes() for t in (buffer, other)] == [0, 0]
    with memory, memory:
        assert all(map(torch.equal, views, expected))
        assert other.untyped_storage().nbytes() == 0
    assert buffer.untyped_storage().nbytes() == 0
    assert memory.resume() == 400 + 14
    assert memory.resume() == 0
    buffer[10] = -1
    assert views[0][0, 0] == -1
    assert other.tolist() == [1.0] * 7
    with memory:
        assert buffer[10] == -1


@pytest.mark.parametrize("as_storages", [False, True])
def test_memory_of_the_process_shrinks_and_grows(tmp_path: Path, *, as_storages: bool) -> None:
    tensors = [torch.full((LARGE,), float(n)) for n in range(2)]
    memory = (
        MovableStorages(lambda: tensors, tuple) if as_storages else MovableTensors(lambda: tensors, torch.device("cpu"))
    )
    full = resident_mib()
    memory.release(tmp_path)
    assert resident_mib() < full - 120
    memory.resume()
    assert resident_mib() > full - 8
    assert [float(tensor[-1]) for tensor in tensors] == [0.0, 1.0]


def test_tensors_stay_usable_where_the_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tensors = [torch.ones(1 << 20)]
    for memory in (MovableTensors(lambda: tensors, torch.device("cpu")), MovableStorages(lambda: tensors, tuple)):
        with pytest.raises(OSError, match="file"):
            memory.release(tmp_path / "file")
        assert memory.resume() == 0
        assert float(tensors[0].sum()) == 1 << 20
