"""Deltas reproduce the exact bits; those that do not fit or are corrupt are refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from broker.errors import StoreError
from relax_actors.weights import deltas
from relax_actors.weights import files as weights
from relax_actors.weights.encoder import LocalSource, WeightEncoder
from relax_actors.weights.host_copy import HostCopy
from relax_actors.weights.protocols import WeightUpdate

SEEDS = st.integers(0, 2**31 - 1)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.float8_e5m2)
SHAPES = ((), (0,), (1,), (7,), (3, 0), (50, 33), (4, 5, 6))


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(source: np.random.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of random bit patterns: infinities, subnormal numbers and NaN included."""
    width = torch.empty((), dtype=dtype).element_size()
    data = source.integers(0, 2 if dtype is torch.bool else 256, (*shape, width), dtype=np.uint8)
    return torch.from_numpy(data.reshape(-1)).view(dtype).reshape(shape)


def perturbed(source: np.random.Generator, tensor: Tensor, share: float, *, far: bool) -> Tensor:
    """Return the tensor with a share of its elements changed, slightly or to random bits."""
    if far or tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        other = random_bits(source, tensor.dtype, tuple(tensor.shape))
    else:
        kind = torch.int16 if tensor.element_size() == 2 else torch.int32
        steps = torch.tensor(source.choice([-200, -2, -1, 1, 2, 127, 128], tensor.shape))
        other = (tensor.view(kind) + steps.to(kind)).view(tensor.dtype)
    return torch.where(torch.tensor(source.random(tensor.shape) < share), other, tensor)


@given(SEEDS, st.floats(0, 1), st.booleans())
def test_applied_delta_gives_the_same_bits(seed: int, share: float, far: bool) -> None:  # noqa: FBT001
    source = np.random.default_rng(seed)
    base = {f"{dtype}.{shape}": random_bits(source, dtype, shape) for dtype in DTYPES for shape in SHAPES}
    new = {name: perturbed(source, tensor, share, far=far) for name, tensor in base.items()}
    delta = deltas.encode(base, new)
    copy = {name: tensor.clone() for name, tensor in base.items()}
    deltas.apply(copy, delta)
    assert {name: bits(tensor) for name, tensor in copy.items()} == {name: bits(tensor) for name, tensor in new.items()}
    assert deltas.nbytes(delta) <= deltas.nbytes(new)
    assert deltas.encode(new, new) == {}


@given(SEEDS, st.sampled_from([1, 254, 255, 256, 257, 509, 510, 511, 3000]))
def test_any_distance_between_two_changes_is_encoded(seed: int, distance: int) -> None:
    base = {"w": torch.zeros(9001, dtype=torch.bfloat16)}
    new = {"w": base["w"].clone()}
    new["w"][seed % 9001 % distance :: distance] = 1.0
    delta = deltas.encode(base, new)
    deltas.apply(base, delta)
    assert torch.equal(base["w"], new["w"])


def test_changes_in_all_blocks_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "_BLOCK", 100)
    source = np.random.default_rng(3)
    base = {"w": random_bits(source, torch.bfloat16, (50, 33))}
    for share in (0.001, 0.02, 0.6):
        new = {"w": perturbed(source, base["w"], share, far=False)}
        copy = {"w": base["w"].clone()}
        deltas.apply(copy, deltas.encode(base, new))
        assert bits(copy["w"]) == bits(new["w"])


def test_delta_of_a_small_bfloat16_step_is_below_a_twentieth_of_the_full_set() -> None:
    generator = torch.Generator().manual_seed(1)
    master = 0.02 * torch.randn(1 << 20, generator=generator)
    step = 1e-6 * torch.randn(1 << 20, generator=generator).sign()
    base, new = {"w": master.bfloat16()}, {"w": (master + step).bfloat16()}
    assert deltas.nbytes(deltas.encode(base, new)) < 0.05 * deltas.nbytes(new)


def test_sets_that_differ_in_names_dtypes_or_shapes_are_refused() -> None:
    base = {"w": torch.zeros(3)}
    for other in ({"v": torch.zeros(3)}, {"w": torch.zeros(3).half()}, {"w": torch.zeros(1, 3)}):
        with pytest.raises(ValueError, match="publish a full set"):
            deltas.encode(base, other)


@pytest.mark.parametrize(
    "delta",
    [
        {"v:gaps": torch.zeros(1, dtype=torch.uint8), "v:steps": torch.zeros(1, dtype=torch.uint8)},
        {"w:gaps": torch.full((9,), 200, dtype=torch.uint8), "w:steps": torch.zeros(9, dtype=torch.uint8)},
        {"w:gaps": torch.zeros(9, dtype=torch.uint8), "w:steps": torch.zeros(1, dtype=torch.uint8)},
        {"w:gaps": torch.zeros(2, dtype=torch.uint8), "w:steps": torch.full((1,), 255, dtype=torch.uint8)},
        {"w:gaps": torch.zeros(2, dtype=torch.uint8)},
        {"w:steps": torch.zeros(2, dtype=torch.uint8)},
        {"w": torch.zeros(5, dtype=torch.bfloat16)},
        {"w": torch.zeros(40)},
    ],
)
def test_delta_that_does_not_fit_is_refused(delta: dict[str, Tensor]) -> None:
    with pytest.raises(StoreError, match="does not fit the weights"):
        deltas.apply({"w": torch.zeros(40, dtype=torch.bfloat16)}, delta)


class TinyPublisher:
    """A model of two tensors that takes small steps and publishes each version in a file."""

    def __init__(self, folder: Path, *, keep_base: bool = True) -> None:
        self.folder = folder
        self.generator = torch.Generator().manual_seed(5)
        self.master = {name: 0.02 * torch.randn(4000, generator=self.generator) for name in ("a", "b")}
        source = LocalSource(lambda: self.master, torch.bfloat16, nullcontext())
        self.encoder = WeightEncoder(source, keep_base=keep_base)
        self.updates: list[WeightUpdate] = []

    def read(self) -> dict[str, Tensor]:
        return {name: tensor.bfloat16() for name, tensor in self.master.items()}

    def step(self, rate: float = 1e-6) -> None:
        for tensor in self.master.values():
            tensor.add_(rate * torch.randn(4000, generator=self.generator))
        self.encoder.invalidate()

    def publish(self, *, full: bool = False) -> WeightUpdate:
        version = len(self.updates)
        path = self.folder / f"{version}.safetensors"
        fingerprint = ((None if full else self.encoder.delta_writer()) or self.encoder.write_full)(path)
        self.encoder.set_base()
        self.updates.append(WeightUpdate(version, fingerprint, [path]))
        return self.updates[-1]

    def publish_series(self, count: int) -> list[WeightUpdate]:
        for _ in range(count):
            self.publish()
            self.step()
        return self.updates


def test_copy_applies_deltas_one_by_one_or_all_at_once(tmp_path: Path) -> None:
    updates = TinyPublisher(tmp_path).publish_series(5)
    assert [weights.delta_base(update.shards[0]) for update in updates] == [
        None,
        *(update.fingerprint for update in updates[:-1]),
    ]
    follower, late = HostCopy(), HostCopy()
    for update in updates:
        follower.apply([update])
    late.apply(updates)
    assert follower.version == late.version == 4
    assert {n: bits(t) for n, t in follower.tensors.items()} == {n: bits(t) for n, t in late.tensors.items()}
    assert updates[4].shards[0].stat().st_size < 0.5 * updates[0].shards[0].stat().st_size


def test_full_set_restarts_the_chain_of_deltas(tmp_path: Path) -> None:
    sender = TinyPublisher(tmp_path)
    first = sender.publish()
    sender.step()
    second = sender.publish(full=True)
    sender.step()
    third = sender.publish()
    copy = HostCopy()
    copy.apply([first])
    copy.apply([second, third])
    assert copy.version == 2
    assert copy.fingerprint == third.fingerprint == weights.fingerprint(sender.read())


def test_delta_to_another_base_is_refused_and_empties_the_copy(tmp_path: Path) -> None:
    updates = TinyPublisher(tmp_path).publish_series(3)
    copy = HostCopy()
    for chain in ([updates[1]], [updates[0], updates[2]]):
        with pytest.raises(StoreError, match="begin with a full set"):
            copy.apply(chain)
        assert (copy.version, copy.tensors) == (None, {})


@given(st.data())
def test_corrupt_file_is_never_applied(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    updates = TinyPublisher(folder).publish_series(3)
    path = updates[data.draw(st.integers(0, 2))].shards[0]
    content = bytearray(path.read_bytes())
    where = data.draw(st.integers(0, len(content) - 1))
    content[where] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    copy = HostCopy()
    try:
        copy.apply(updates)
    except StoreError:
        assert copy.version is None
    else:
        # A flipped bit may be in unused header text, or in an element that a later delta overwrites.
        assert weights.fingerprint(copy.tensors) == updates[2].fingerprint


def test_missing_file_is_named(tmp_path: Path) -> None:
    updates = TinyPublisher(tmp_path).publish_series(2)
    updates[1].shards[0].unlink()
    with pytest.raises(StoreError, match=r"1\.safetensors cannot be read"):
        HostCopy().apply(updates)


def test_file_removed_while_it_is_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = TinyPublisher(tmp_path).publish_series(2)
    shard, opened_by_torch = updates[1].shards[0], torch.UntypedStorage.from_file

    def remove_first(name: str, *args: Any, **options: Any) -> object:
        if Path(name) == shard:
            shard.unlink()
        return opened_by_torch(name, *args, **options)

    # safetensors has opened the file before torch does.
    monkeypatch.setattr(torch.UntypedStorage, "from_file", remove_first)
    with pytest.raises(StoreError, match=r"1\.safetensors cannot be read") as refused:
        HostCopy().apply(updates)
    # The cause tells the stager not to remove the file, which the trainer may have rewritten.
    assert isinstance(refused.value.__cause__, OSError)


def test_large_steps_and_an_encoder_without_base_have_no_delta(tmp_path: Path) -> None:
    sender = TinyPublisher(tmp_path)
    sender.publish()
    assert sender.encoder.delta_writer() is not None
    sender.step(rate=1.0)
    assert sender.encoder.delta_writer() is None
    without_base = TinyPublisher(tmp_path, keep_base=False)
    without_base.publish()
    without_base.step()
    assert without_base.encoder.delta_writer() is None
