"""The experts that a server chose for every token, as router replay wants them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.model_folder import MoeFacts
from relax_actors.errors import EngineError
from relax_actors.messages.experts import flaw


def routed_experts(text: str, tokens: int, moe: MoeFacts) -> NDArray[Any]:
    """`[tokens, layers, experts_of_token] int16`.

    Args:
        text: base64 of int32, from the answer's `meta_info["routed_experts"]`.
        tokens: of prompt and completion but the last, which no layer has seen.
        moe: of the model.

    Raises:
        EngineError: it is not that many numbers, or what no router of the model can have chosen.
    """
    # It tells of every layer, also of those without experts.
    shape = tokens, moe.layers + len(moe.without), moe.experts_of_token
    try:
        found = np.frombuffer(base64.b64decode(text, validate=True), "<i4").reshape(shape)
    except ValueError as error:
        msg = f"a server told routed experts that are not {list(shape)}: {error}"
        raise EngineError(msg) from error
    found = np.delete(found, moe.without, 1).astype(np.int16)
    if why := flaw(found, moe.experts):
        msg = f"a server told routed experts that cannot be: {why}"
        raise EngineError(msg)
    return found
