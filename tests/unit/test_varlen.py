"""Which attention of packed sequences reaches torch's varlen kernel; fake tensors stand for those of CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from relax_actors.engines.torch import varlen
from relax_actors.engines.torch.packing import Packing


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


@contextmanager
def autocast() -> Iterator[None]:
    """Turn autocast to bfloat16 on, which `torch.autocast` refuses without CUDA."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def queries(heads: int, width: int = 16, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Tensor:
    return torch.empty(9, heads, width, dtype=dtype, device=device)


def test_only_cuda_in_half_precision_with_a_width_of_the_kernel_is_served() -> None:
    assert varlen.can_attend(queries(4), None)
    assert varlen.can_attend(queries(4, dtype=torch.float16), 3)
    for other in (queries(4, device="cpu"), queries(4, dtype=torch.float32), queries(4, 12), queries(4, 264)):
        assert not varlen.can_attend(other, None)
    with autocast():
        assert varlen.can_attend(queries(4, dtype=torch.float32), None)


@pytest.mark.parametrize("settings", [{}, {"scale": 0.3, "window": 4}])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_packed_sequences_with_shared_prefixes_reach_the_kernel(settings: dict[str, float], key_heads: int) -> None:
    cpu = torch.device("cpu")
    packing = Packing.of([5, 6, 2], cpu, [0, 4, 0])
    assert packing.keys is not None
    on_cuda = [
        torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in (packing.keys, packing.ends, packing.key_ends)
    ]
    packing = replace(packing, keys=on_cuda[0], ends=on_cuda[1], key_ends=on_cuda[2])
    key = queries(key_heads)
    output = packing.attend(queries(4), key, key, **settings)
    assert (output.shape, output.dtype, output.device.type) == ((9, 4, 16), torch.bfloat16, "cuda")
    with autocast():  # rotary embeddings leave queries and keys in float32
        assert packing.attend(queries(4, dtype=torch.float32), key.float(), key, **settings).dtype == torch.bfloat16
