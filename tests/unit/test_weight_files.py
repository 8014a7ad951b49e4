"""Weight files: what is written one tensor at a time is read by safetensors, whatever the types and the order."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import safetensors
import torch

from relax_actors.weights import files as weights
from relax_actors.weights.files import Fingerprint, TensorFile, TensorForm

TENSORS = {
    "b.bytes": torch.arange(5, dtype=torch.uint8),
    "a.half": torch.randn(3, 5).bfloat16(),
    "c.full": torch.randn(2, 3, 4),
    "d.scalar": torch.tensor(3.5),
    "e.empty": torch.zeros(0, 4),
    "f.signs": torch.tensor([True, False, True]),
    "g.view": torch.arange(12.0).reshape(3, 4).t(),
    "h.long": torch.arange(3),
}


def test_tensors_of_all_types_written_in_any_order_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    forms = {name: TensorForm.of(tensor) for name, tensor in TENSORS.items()}
    with TensorFile(path, forms, {"format": "pt"}) as file:
        for name in reversed(TENSORS):
            file.write(name, TENSORS[name])
    found = weights.load([path])
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert all(found[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
    with safetensors.safe_open(path, framework="np") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_tensors_lie_where_their_elements_are_aligned(tmp_path: Path) -> None:
    weights.save(TENSORS, path := tmp_path / "file.safetensors")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + length]).items():
        assert (8 + length + entry["data_offsets"][0]) % TENSORS[name].element_size() == 0


def test_a_file_without_tensors_is_read(tmp_path: Path) -> None:
    weights.save({}, path := tmp_path / "file.safetensors", base="of")
    assert weights.load([path]) == {}
    assert weights.delta_base(path) == "of"


def test_a_file_may_be_replaced_by_its_own_tensors(tmp_path: Path) -> None:
    size = 2**20  # far beyond what one page of a mapping holds
    weights.save({"a": torch.arange(size)}, path := tmp_path / "file.safetensors")
    weights.save(weights.load([path]) | {"b": torch.ones(2)}, path)
    assert torch.equal(weights.load([path])["a"], torch.arange(size))


def test_fingerprint_of_tensors_one_by_one_is_that_of_all() -> None:
    one = Fingerprint()
    for name in sorted(TENSORS):
        one.add(name, TENSORS[name])
    assert one.hexdigest() == weights.fingerprint(TENSORS)
    assert weights.fingerprint({"a": torch.ones(2)}) == "adbf77aaf6b9da59d371b1f891be8332"


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as refused:
        weights.save({"a": torch.zeros(1 << 20)}, tmp_path / "full")
    assert refused.value.errno == errno.ENOSPC
