"""A delta leads to the same bits, whatever the bits are; one that does not fit, or was damaged, is never applied."""

from __future__ import annotations

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
from relax_actors.weights.encoder import WeightEncoder
from relax_actors.weights.host_copy import HostCopy
from relax_actors.weights.protocol import Step

SEEDS = st.integers(0, 2**31 - 1)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.float8_e5m2)
SHAPES = ((), (0,), (1,), (7,), (3, 0), (50, 33), (4, 5, 6))


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(source: np.random.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of any bit patterns: infinities, subnormal numbers and every kind of nan among them."""
    width = torch.empty((), dtype=dtype).element_size()
    data = source.integers(0, 2 if dtype is torch.bool else 256, (*shape, width), dtype=np.uint8)
    return torch.from_numpy(data.reshape(-1)).view(dtype).reshape(shape)


def moved(source: np.random.Generator, tensor: Tensor, share: float, *, far: bool) -> Tensor:
    """The tensor with a share of its elements changed: to a neighbour, or to any bits."""
    if far or tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        other = random_bits(source, tensor.dtype, tuple(tensor.shape))
    else:
        kind = torch.int16 if tensor.element_size() == 2 else torch.int32
        steps = torch.tensor(source.choice([-200, -2, -1, 1, 2, 127, 128], tensor.shape))
        other = (tensor.view(kind) + steps.to(kind)).view(tensor.dtype)
    return torch.where(torch.tensor(source.random(tensor.shape) < share), other, tensor)


@given(SEEDS, st.floats(0, 1), st.booleans())
def test_a_delta_leads_to_the_same_bits(seed: int, share: float, far: bool) -> None:  # noqa: FBT001
    source = np.random.default_rng(seed)
    base = {f"{dtype}.{shape}": random_bits(source, dtype, shape) for dtype in DTYPES for shape in SHAPES}
    new = {name: moved(source, tensor, share, far=far) for name, tensor in base.items()}
    delta = deltas.encode(base, new)
    copy = {name: tensor.clone() for name, tensor in base.items()}
    deltas.apply(copy, delta)
    assert {name: bits(tensor) for name, tensor in copy.items()} == {name: bits(tensor) for name, tensor in new.items()}
    assert deltas.nbytes(delta) <= deltas.nbytes(new)
    assert deltas.encode(new, new) == {}


@given(SEEDS, st.sampled_from([1, 254, 255, 256, 257, 509, 510, 511, 3000]))
def test_any_distance_between_two_changes_can_be_told(seed: int, distance: int) -> None:
    base = {"w": torch.zeros(9001, dtype=torch.bfloat16)}
    new = {"w": base["w"].clone()}
    new["w"][seed % 9001 % distance :: distance] = 1.0
    delta = deltas.encode(base, new)
    deltas.apply(base, delta)
    assert torch.equal(base["w"], new["w"])


def test_changes_beyond_one_block_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "_BLOCK", 100)
    source = np.random.default_rng(3)
    base = {"w": random_bits(source, torch.bfloat16, (50, 33))}
    for share in (0.001, 0.02, 0.6):
        new = {"w": moved(source, base["w"], share, far=False)}
        copy = {"w": base["w"].clone()}
        deltas.apply(copy, deltas.encode(base, new))
        assert bits(copy["w"]) == bits(new["w"])


def test_a_small_step_of_bfloat16_weights_takes_a_twentieth_of_their_bytes() -> None:
    generator = torch.Generator().manual_seed(1)
    master = 0.02 * torch.randn(1 << 20, generator=generator)
    step = 1e-6 * torch.randn(1 << 20, generator=generator).sign()
    base, new = {"w": master.bfloat16()}, {"w": (master + step).bfloat16()}
    assert deltas.nbytes(deltas.encode(base, new)) < 0.05 * deltas.nbytes(new)


def test_sets_of_other_names_dtypes_or_shapes_have_no_delta() -> None:
    base = {"w": torch.zeros(3)}
    for other in ({"v": torch.zeros(3)}, {"w": torch.zeros(3).half()}, {"w": torch.zeros(1, 3)}):
        with pytest.raises(ValueError, match="publish the newer one whole"):
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
def test_a_delta_that_does_not_fit_is_refused(delta: dict[str, Tensor]) -> None:
    with pytest.raises(StoreError, match="does not fit the weights"):
        deltas.apply({"w": torch.zeros(40, dtype=torch.bfloat16)}, delta)


class Sender:
    """A model of two tensors that takes small steps, and publishes each in a file."""

    def __init__(self, folder: Path, *, remembers: bool = True) -> None:
        self.folder = folder
        self.generator = torch.Generator().manual_seed(5)
        self.master = {name: 0.02 * torch.randn(4000, generator=self.generator) for name in ("a", "b")}
        self.encoder = WeightEncoder(self.read, remembers=remembers)
        self.steps: list[Step] = []

    def read(self) -> dict[str, Tensor]:
        return {name: tensor.bfloat16() for name, tensor in self.master.items()}

    def move(self, rate: float = 1e-6) -> None:
        for tensor in self.master.values():
            tensor.add_(rate * torch.randn(4000, generator=self.generator))
        self.encoder.changed()

    def publish(self, *, whole: bool = False) -> Step:
        version = len(self.steps)
        path = self.folder / f"{version}.safetensors"
        fingerprint = ((None if whole else self.encoder.delta()) or self.encoder.whole)(path)
        self.encoder.remember()
        self.steps.append(Step(version, fingerprint, [path]))
        return self.steps[-1]

    def series(self, count: int) -> list[Step]:
        for _ in range(count):
            self.publish()
            self.move()
        return self.steps


def test_a_copy_follows_deltas_one_by_one_or_all_at_once(tmp_path: Path) -> None:
    steps = Sender(tmp_path).series(5)
    assert [weights.base_of(step.shards[0]) for step in steps] == [None, *(step.fingerprint for step in steps[:-1])]
    follower, late = HostCopy(), HostCopy()
    for step in steps:
        follower.take([step])
    late.take(steps)
    assert follower.version == late.version == 4
    assert {n: bits(t) for n, t in follower.tensors.items()} == {n: bits(t) for n, t in late.tensors.items()}
    assert steps[4].shards[0].stat().st_size < 0.5 * steps[0].shards[0].stat().st_size


def test_a_whole_set_on_the_way_is_a_new_beginning(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    first = sender.publish()
    sender.move()
    second = sender.publish(whole=True)
    sender.move()
    third = sender.publish()
    copy = HostCopy()
    copy.take([first])
    copy.take([second, third])
    assert copy.version == 2
    assert copy.fingerprint == third.fingerprint == weights.fingerprint(sender.read().items())


def test_a_delta_to_something_else_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    steps = Sender(tmp_path).series(3)
    copy = HostCopy()
    for way in ([steps[1]], [steps[0], steps[2]]):
        with pytest.raises(StoreError, match="begin with a whole set"):
            copy.take(way)
        assert (copy.version, copy.tensors) == (None, {})


@given(st.data())
def test_a_damaged_file_is_never_served(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    steps = Sender(folder).series(3)
    path = steps[data.draw(st.integers(0, 2))].shards[0]
    content = bytearray(path.read_bytes())
    where = data.draw(st.integers(0, len(content) - 1))
    content[where] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    copy = HostCopy()
    try:
        copy.take(steps)
    except StoreError:
        assert copy.version is None
    else:
        # A bit of the header's text may not matter, or a later delta may not touch it: then all is as published.
        assert weights.fingerprint(copy.tensors.items()) == steps[2].fingerprint


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    steps = Sender(tmp_path).series(2)
    steps[1].shards[0].unlink()
    with pytest.raises(StoreError, match=r"1\.safetensors cannot be read"):
        HostCopy().take(steps)


def test_a_file_that_goes_while_it_is_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Sender(tmp_path).series(2)
    shard, opened_by_torch = steps[1].shards[0], torch.UntypedStorage.from_file

    def gone_by_now(name: str, *args: Any, **options: Any) -> object:
        if Path(name) == shard:
            shard.unlink()
        return opened_by_torch(name, *args, **options)

    # safetensors has opened the file by then.
    monkeypatch.setattr(torch.UntypedStorage, "from_file", gone_by_now)
    with pytest.raises(StoreError, match=r"1\.safetensors cannot be read") as refused:
        HostCopy().take(steps)
    # So that nobody removes it: the trainer may have written it anew.
    assert isinstance(refused.value.__cause__, OSError)


def test_large_steps_and_a_sender_without_memory_have_no_delta(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    sender.publish()
    assert sender.encoder.delta() is not None
    sender.move(rate=1.0)
    assert sender.encoder.delta() is None
    forgetful = Sender(tmp_path, remembers=False)
    forgetful.publish()
    forgetful.move()
    assert forgetful.encoder.delta() is None
