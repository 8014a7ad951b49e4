"""The experts that a server chose for every token, as router replay wants them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.errors import EngineError


def routed_experts(text: str, tokens: int, layers: int, top_k: int, experts: int) -> NDArray[Any]:
    """`[tokens, layers, top_k]`, uint8 if there are at most 256 experts, else int16.

    Args:
        text: base64 of int32, from the answer's `meta_info["routed_experts"]`.
        tokens: of prompt and completion but the last, which no layer has seen.
        layers: that have experts.
        top_k: experts of a token.
        experts: of a layer.

    Raises:
        EngineError: it is not that many numbers, or names experts that there are not.
    """
    try:
        found = np.frombuffer(base64.b64decode(text, validate=True), "<i4").reshape(tokens, layers, top_k)
    except ValueError as error:
        msg = f"a server told routed experts that are not [{tokens}, {layers}, {top_k}]: {error}"
        raise EngineError(msg) from error
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < experts:
        msg = f"a server told experts from {int(found.min())} to {int(found.max())}, a layer has {experts}"
        raise EngineError(msg)
    return found.astype(np.uint8 if experts <= 256 else np.int16)  # noqa: PLR2004 what a byte can tell apart
