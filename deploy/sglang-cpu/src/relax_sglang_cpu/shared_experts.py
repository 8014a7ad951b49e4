"""The gate of the shared expert of Qwen's models with experts, in torch: SGLang has a Triton kernel alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from relax_sglang_cpu.on_import import change


def install() -> None:
    """Replace SGLang's function before its models import it."""
    change("sglang.kernels.ops.elementwise.elementwise", _replace)


def _replace(module: Any) -> None:
    module.fused_gate_sigmoid_mul_add = gate_sigmoid_mul_add


def gate_sigmoid_mul_add(hidden: Tensor, gate: Tensor, shared: Tensor, output: Tensor) -> None:
    """Add the output of the shared expert, times its gate, to that of the routed ones.

    Args:
        hidden: `[tokens, hidden]`, inputs of the layer.
        gate: `[hidden]`, weight of the gate.
        shared: `[tokens, hidden]`, output of the shared expert.
        output: `[tokens, hidden]`, output of the routed experts, which is changed.
    """
    output.add_((hidden @ gate).sigmoid()[:, None] * shared)
