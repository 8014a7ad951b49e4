"""What ranks tell each other: plain data and arrays come back as they were sent, and nothing else is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relax_actors.engines.megatron import wire


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"measured": [{"loss": 0.5, "tokens": 3.0}], "nested": [[1, [True, "x", b"\0"]], {}]},
        {3: "numbers may be keys", "layers.0.mlp": [0, [12, 8]]},
        1 << 62,
    ],
)
def test_plain_data_comes_back(message: Any) -> None:
    assert wire.decode(wire.encode(message)) == message


def test_arrays_come_back_with_type_and_shape() -> None:
    arrays = [np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1], np.zeros((0, 4), np.float32), np.array(3.5)]
    for sent, found in zip(arrays, wire.decode(wire.encode(arrays)), strict=True):
        assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
        np.testing.assert_array_equal(found, sent)
    assert wire.decode(wire.encode([np.float32(0.5)])) == [0.5]


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(TypeError, match="a object cannot be sent"):
        wire.encode({"x": object()})
