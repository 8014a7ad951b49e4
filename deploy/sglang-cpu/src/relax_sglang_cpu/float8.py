"""Layers with FP8 weights in blocks, in torch: weights and inputs as on a GPU, with sums in float32.

Weights stay as they are loaded. The inputs of a layer are rounded to float8, too, with a scale for 128 neighbours of a
token, as the kernels for GPUs do before they multiply. Those sum products less exactly, and no figure of both has been
compared.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization import fp8
from torch import Tensor
from torch.nn.functional import linear, silu

TINY = 1e-10
"""Smallest largest number of a group, that of SGLang's kernel."""


def install() -> None:
    """Replace the methods of FP8 layers that ask for the matrix units of a CPU (AMX) or a GPU."""
    fp8.dispatch_w8a8_block_fp8_linear = lambda **_: _multiply_layer
    fp8.Fp8LinearMethod.process_weights_after_loading = _keep
    fp8.Fp8MoEMethod.process_weights_after_loading = _keep
    fp8.Fp8MoEMethod.apply = _apply_experts
    fp8.Fp8Config.get_supported_act_dtypes = classmethod(lambda _: [torch.float32, torch.bfloat16, torch.float16])


def _keep(_method: Any, layer: Any) -> None:
    """Leave weights and scales as they were loaded, so that the next update can write them."""
    del layer


def _rounded(inputs: Tensor, size: int) -> Tensor:
    """Round inputs to float8 in groups of `size` along the last dimension; returns them in float32."""
    most = torch.finfo(torch.float8_e4m3fn).max
    groups = inputs.float().unflatten(-1, (-1, size))
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(TINY) / most
    return ((groups / scales).clamp(-most, most).to(torch.float8_e4m3fn).float() * scales).flatten(-2)


def _multiply(inputs: Tensor, weight: Tensor, scales: Tensor, block: list[int]) -> Tensor:
    """Multiply rounded inputs `[tokens, columns]` by a weight `[rows, columns]`; returns `[tokens, rows] float32`."""
    rows, columns = block
    each = scales.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]
    return linear(_rounded(inputs, columns), weight.float() * each)


def _multiply_layer(
    input: Tensor,  # noqa: A002 names of SGLang's function
    weight: Tensor,
    block_size: list[int],
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute a linear layer, in place of `triton_w8a8_block_fp8_linear`."""
    assert input_scale is None  # noqa: S101 inputs are not quantised before
    product = _multiply(input, weight, weight_scale, block_size)
    return (product if bias is None else product + bias).to(input.dtype)


def _apply_experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Compute the experts of a layer one by one, in place of a fused kernel."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    tokens, block = dispatch_output.hidden_states, method.weight_block_size
    chosen_weights, chosen, _ = dispatch_output.topk_output
    sums = torch.zeros(tokens.shape, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        places = chosen == expert
        of = places.any(1)
        parts = _multiply(tokens[of], layer.w13_weight[expert], layer.w13_weight_scale_inv[expert], block)
        gate, up = parts.to(tokens.dtype).chunk(2, -1)
        inner = (silu(gate.float()) * up.float()).to(tokens.dtype)
        made = _multiply(inner, layer.w2_weight[expert], layer.w2_weight_scale_inv[expert], block)
        sums[of] += made * (chosen_weights * places)[of].sum(1, keepdim=True)
    return StandardCombineInput(hidden_states=sums.to(tokens.dtype))
