"""Experts chosen for each token, decoded from a server's answer for router replay."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.model_folder import MoeFacts
from relax_actors.errors import EngineError
from relax_actors.messages.experts import invalid_reason


def routed_experts(text: str, tokens: int, moe: MoeFacts) -> NDArray[Any]:
    """Decode the chosen experts, `[tokens, layers, experts_of_token] int16`.

    Args:
        text: `meta_info["routed_experts"]` of an answer: base64 of int32.
        tokens: number of tokens of prompt and completion without the last one, which no layer has read.
        moe: of the model.

    Raises:
        EngineError: the shape is wrong, or no router of the model can have chosen these experts.
    """
    # SGLang reports all layers, including those without experts.
    shape = tokens, moe.layers + len(moe.without), moe.experts_of_token
    try:
        found = np.frombuffer(base64.b64decode(text, validate=True), "<i4").reshape(shape)
    except ValueError as error:
        msg = f"a server sent routed experts that are not {list(shape)}: {error}"
        raise EngineError(msg) from error
    found = np.delete(found, moe.without, 1).astype(np.int16)
    if why := invalid_reason(found, moe.experts):
        msg = f"a server sent routed experts that are not valid: {why}"
        raise EngineError(msg)
    return found
