"""Messages between ranks: plain data and arrays survive a round trip, anything else is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relax_actors.engines.ranks import wire


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"measured": [{"loss": 0.5, "tokens": 3.0}], "nested": [[1, [True, "x", b"\0"]], {}]},
        {3: "keys may be numbers", "layers.0.mlp": [0, [12, 8]]},
        1 << 62,
    ],
)
def test_plain_data_survives_round_trip(message: Any) -> None:
    assert wire.decode(wire.encode(message)) == message


def test_arrays_keep_dtype_and_shape() -> None:
    arrays = [np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1], np.zeros((0, 4), np.float32), np.array(3.5)]
    for sent, received in zip(arrays, wire.decode(wire.encode(arrays)), strict=True):
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        np.testing.assert_array_equal(received, sent)
    assert wire.decode(wire.encode([np.float32(0.5)])) == [0.5]


def test_other_values_are_refused() -> None:
    with pytest.raises(TypeError, match="value of type object cannot be sent"):
        wire.encode({"x": object()})
