"""Import-only replacement of sglang-kernel, which exists for CUDA only.

SGLang imports it on a CPU without calling it.

Three names are left out on purpose, because SGLang takes them as a sign of native CPU kernels:
`convert_weight_packed`, `fused_qk_norm_cpu`, `fused_qk_norm_rope_cpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

if torch.version.cuda is not None:
    msg = "relax-sglang-cpu replaces sglang-kernel only where torch has no CUDA; run `pip uninstall relax-sglang-cpu`"
    raise ImportError(msg)

__version__ = "0.4.10"

# Attributes of torch.ops.sgl_kernel that SGLang's model files read on import.
_READ_AT_IMPORT = (
    "fused_dual_residual_rmsnorm_cpu",
    "fused_gdn_gating_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
    "rmsnorm_cpu",
)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        msg = f"sgl_kernel.{name} does not exist without CUDA; use a GPU, or another backend for this model"
        raise NotImplementedError(msg)

    missing.__name__ = name
    return missing


for _name in _READ_AT_IMPORT:
    if not hasattr(torch.ops.sgl_kernel, _name):
        setattr(torch.ops.sgl_kernel, _name, __getattr__(_name))
