"""Features of random media against the processors of transformers, bit for bit.

The same as benchmarks/media_parity.py, which compares 2,000. The processors need torchvision: `make sglang`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torchvision", reason="the video processors of transformers need torchvision: make sglang")

from benchmarks.media_parity import compare


@pytest.mark.parametrize("count", [45, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_features_equal_those_of_transformers_bit_for_bit(count: int) -> None:
    done, different = compare(count, 0)
    assert done.total() == count
    assert different == []
