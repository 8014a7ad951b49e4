"""Quantises the weights that a server's ranks load, at each update; imported by processes of SGLang alone.

SGLang is started as a server of a checkpoint in FP8 (`Fp8Config` with blocks of 128 x 128). Its layers then have
parameters in the form of such a checkpoint, and keep them in this form after a load, so that the next update can write
them again. Updates bring unquantised tensors. A layer's loader gets each whole tensor, before it takes the part of its
rank; here it quantises the tensor first, on the rank's device, and loads values and scales in its place. Nothing
depends on how the tensor arrived: from a file, from shared memory or by broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from torch import Tensor

from relax_actors.engines.sglang.float8_blocks import quantised


def extend_layers() -> None:
    """Have the layers of this process quantise what they load.

    Not by hooks of SGLang's plugin registry, which only logs that a function to hook is gone: layers would then load
    numbers of half precision into parameters of float8, without a scale.
    """
    for method, create in ((Fp8LinearMethod, _create_linear), (Fp8MoEMethod, _create_experts)):
        method.create_weights = partialmethod(create, method.create_weights)


def _create_linear(method: Any, create: Callable[..., None], *sizes: Any, **given: Any) -> None:
    """Create the parameters of a linear layer, the first of `sizes` or `layer`, with a loader that quantises.

    Raises:
        RuntimeError: the GPU needs the weights in another form than that of updates.
    """
    if method.use_marlin:
        msg = (
            "this GPU has no float8 arithmetic, and SGLang repacks FP8 weights for it in a form that no update can "
            'write; set rollout.sglang.quantization = "none", or use a GPU of compute capability 8.9 or higher'
        )
        raise RuntimeError(msg)
    layer, load = given["layer"] if "layer" in given else sizes[0], given.pop("weight_loader")

    def load_quantised(parameter: Any, loaded: Tensor, *rest: Any, **named: Any) -> None:
        values, scales = _quantised(loaded, parameter, layer.weight_scale_inv)
        load(parameter, values, *rest, **named)
        load(layer.weight_scale_inv, scales, *rest, **named)

    create(method, *sizes, weight_loader=load_quantised, **given)


def _create_experts(method: Any, create: Callable[..., None], **given: Any) -> None:
    """Create the parameters of the experts of a layer, with a loader that quantises."""
    layer, load = given["layer"], given.pop("weight_loader")

    def load_quantised(parameter: Any, loaded: Tensor, name: str, *rest: Any, **named: Any) -> None:
        scale = layer.w2_weight_scale_inv if parameter is layer.w2_weight else layer.w13_weight_scale_inv
        values, scales = _quantised(loaded, parameter, scale)
        load(parameter, values, name, *rest, **named)
        load(scale, scales, f"{name}_scale_inv", *rest, **named)

    create(method, weight_loader=load_quantised, **given)


def _quantised(loaded: Tensor, parameter: Any, scale: Any) -> tuple[Tensor, Tensor]:
    """Quantise a tensor on the device of a parameter.

    Raises:
        RuntimeError: SGLang has changed the form of the scale, as its kernels of DeepGEMM need on Blackwell.
    """
    if scale.dtype != torch.float32:
        msg = (
            f"SGLang holds scales of FP8 weights as {scale.dtype} for its kernels, a form that no update can write; "
            "leave --fp8-gemm-backend and --moe-runner-backend out of rollout.sglang.arguments"
        )
        raise RuntimeError(msg)
    return quantised(loaded.to(parameter.device))
