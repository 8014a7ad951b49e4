"""Conversations of samples as one array, which may be larger than a cell: arrays are stored apart from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from broker.errors import CodecError
from broker.items import check_items

MAX_ITEMS = 1 << 20
"""Texts, numbers, lists and dicts of the conversations of a row."""


def pack_conversations(conversations: Sequence[Sequence[dict[str, Any]]]) -> NDArray[np.uint8]:
    """Return conversations, a list of chat messages each, as `[bytes] uint8`.

    Raises:
        ValueError: they hold something else than plain data.
    """
    try:
        return np.frombuffer(msgpack.packb([list(c) for c in conversations], use_bin_type=True), np.uint8)
    except (TypeError, OverflowError) as error:
        msg = f"the conversation of a sample cannot be stored: {error}"
        raise ValueError(msg) from error


def unpack_conversations(packed: NDArray[Any], samples: int) -> list[list[dict[str, Any]]]:
    """Return the conversations of `pack_conversations`.

    Raises:
        ValueError: the array does not hold a conversation for each sample.
    """
    data = packed.astype(np.uint8).tobytes()
    try:
        check_items(data, MAX_ITEMS)
        found: list[list[dict[str, Any]]] = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (CodecError, ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        msg = f"the conversations of a trajectory are malformed: {str(error)[:200]}"
        raise ValueError(msg) from error
    is_list = isinstance(found, list) and len(found) == samples
    if not is_list or not all(isinstance(m, dict) for c in found for m in (c if isinstance(c, list) else [c, None])):
        msg = f"the conversations of a trajectory are not {samples} lists of messages"
        raise ValueError(msg)
    return found
