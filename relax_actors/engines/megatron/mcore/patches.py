"""Patches for bugs of megatron-core 0.16, one function a bug.

Each is covered by a test that fails without it. The first two also apply on GPUs without TransformerEngine, to MoE
and to latent attention, the others on the CPU only. A newer megatron-core with its own fix stays unpatched.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher


def apply(*, on_cpu: bool) -> None:
    """Apply all patches; idempotent."""
    define_te_general_gemm()
    tell_latent_attention_of_transformer_engine()
    if on_cpu:
        convert_split_sizes_to_ints()
        use_cpu_generator()


def define_te_general_gemm() -> None:
    """Fix a NameError of MoE without TransformerEngine, whose import defines the name."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def tell_latent_attention_of_transformer_engine() -> None:
    """Fix a TypeError of latent attention, which takes TransformerEngine for installed where only its imports work."""
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


class _Splits(list[int]):
    """Split sizes as `all_to_all_single` needs them, with the `tolist` of a tensor."""

    def tolist(self) -> list[int]:
        return list(self)


def convert_split_sizes_to_ints() -> None:
    """Convert split sizes that are on the CPU to ints; as a tensor they raise TypeError."""

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001, FBT001, FBT002
        return _Splits(tensor.tolist()) if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = move


def use_cpu_generator() -> None:
    """Read and set the random state of the CPU generator instead of CUDA's."""

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:  # noqa: ARG001, FBT001, FBT002
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:  # noqa: ARG001, FBT001, FBT002
        torch.set_rng_state(state)

    random._get_cuda_rng_state = get_state  # noqa: SLF001
    random._set_cuda_rng_state = set_state  # noqa: SLF001
