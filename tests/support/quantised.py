"""What a server with FP8 weights computes, by a transformers model whose numbers are rounded to float8."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from relax_actors.config import Config
from relax_actors.engines.protocols import Generation, GenerationRequest
from tests.support.models import ReferenceModel, qwen3_moe, random_weights
from tests.support.sglang_servers import DENSE

SIDE, LARGEST = 128, 448.0
"""Rows and columns of a block, and the largest number of float8 (e4m3)."""
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
WIDE = DENSE | SHAPE | {"head_dim": 64}
"""A tiny model whose layers have whole blocks on each of two ranks."""
WIDE_EXPERTS = qwen3_moe(WIDE, experts=4) | {"moe_intermediate_size": 256}


def in_float8(blocks: Tensor) -> Tensor:
    """Round numbers that share a scale, `[..., numbers]`, to what float8 with this scale can express."""
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-10) / LARGEST
    return (blocks / scale).to(torch.float8_e4m3fn).float() * scale


def weight_in_float8(weight: Tensor) -> Tensor:
    """Round each block of 128 x 128 of a weight, `[rows, columns]`."""
    found = weight.clone()
    for row in range(0, weight.shape[0], SIDE):
        for column in range(0, weight.shape[1], SIDE):
            block = weight[row : row + SIDE, column : column + SIDE]
            found[row : row + SIDE, column : column + SIDE] = in_float8(block.flatten()).view(block.shape)
    return found


def inputs_in_float8(inputs: Tensor) -> Tensor:
    """Round each 128 neighbours of a token, `[..., width]`."""
    return in_float8(inputs.unflatten(-1, (-1, SIDE))).flatten(-2)


class Float8Model(ReferenceModel):
    """Rounds weights and inputs of the linear layers and experts; embeddings, head and router stay as they are."""

    def __init__(self, config: Config, tensors: dict[str, Tensor]) -> None:
        super().__init__(config, tensors)
        for name, module in self.model.named_modules():
            if name.endswith("_proj") and isinstance(module, nn.Linear):
                module.weight.data = weight_in_float8(module.weight.data)
                module.register_forward_pre_hook(lambda _, inputs: (inputs_in_float8(inputs[0]),))
            elif name.endswith(".experts"):
                for weight in (module.gate_up_proj, module.down_proj):
                    weight.data = torch.stack([weight_in_float8(expert) for expert in weight.data])
                module.forward = _Experts(module)


class _Experts:
    """Computes the experts of a layer one by one, from rounded inputs."""

    def __init__(self, module: Any) -> None:
        self._gate_up, self._down = module.gate_up_proj.data, module.down_proj.data

    def __call__(self, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        found = torch.zeros_like(tokens)
        for expert, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            gate, up = (inputs_in_float8(tokens) @ gate_up.T).chunk(2, -1)
            made = inputs_in_float8(nn.functional.silu(gate) * up) @ down.T
            found += made * (shares * (chosen == expert)).sum(-1, keepdim=True)
        return found


def check_quantised(
    config: Config,
    made: list[tuple[GenerationRequest, Generation]],
    scales: dict[int, float],
    *,
    is_long: bool = False,
) -> None:
    """Compare log-probs with those of `random_weights` in float8, of the version that wrote the token.

    A sum of float32 that is rounded otherwise can move an input of the next layer to the next number of float8, a 16th
    away, and with it the log-probs of this token and all after it. On average such steps are small beside what float8
    changes: a tenth of the distance from the unquantised model. Most tokens of short samples agree to 1e-5.
    """
    for version, scale in scales.items():
        tensors = random_weights(config, scale)
        rounded, exact = (
            np.concatenate([_distance(model, asked, sample)[sample.versions == version] for asked, sample in made])
            for model in (Float8Model(config, tensors), ReferenceModel(config, tensors))
        )
        assert len(rounded), f"no token of version {version}"
        assert rounded.mean() < exact.mean() / 10
        assert is_long or np.median(rounded) < 1e-5


def _distance(model: ReferenceModel, request: GenerationRequest, sample: Generation) -> NDArray[Any]:
    """Distances of a sample's log-probs from those of a model, `[len] float32`."""
    found: NDArray[Any] = np.abs(sample.logprobs - model.logprobs(request, sample))
    return found
