"""Patches for bugs of megatron-core 0.16, one function a bug.

Each is covered by a test that fails without it. All but the last two also apply on GPUs: MoE and torch's AdamW without
TransformerEngine, and checkpoints everywhere. The last two apply on the CPU only. A newer megatron-core with its own
fix stays unpatched.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils, token_dispatcher

_PATCHED = "_relax_actors_patched"


def apply(*, on_cpu: bool) -> None:
    """Apply all patches; idempotent."""
    define_te_general_gemm()
    if not getattr(DistributedOptimizer, _PATCHED, False):
        initialise_adamw_state_before_saving()
        restore_step_when_resharding()
        separate_steps_after_loading()
        save_padding_between_buckets()
        setattr(DistributedOptimizer, _PATCHED, True)
    if on_cpu:
        convert_split_sizes_to_ints()
        use_cpu_generator()


def define_te_general_gemm() -> None:
    """Fix a NameError of MoE without TransformerEngine, whose import defines the name."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def initialise_adamw_state_before_saving() -> None:
    """Create the state of torch's AdamW at step 0 if a checkpoint is written before a step.

    `DistributedOptimizer.state_dict` asserts that a step was taken; version 0 is checkpointed before the first step.
    """
    original = DistributedOptimizer.state_dict

    def state_dict(self: Any) -> Any:
        if not self.optimizer.state:
            rates = [group["lr"] for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
            self._init_optimizer_states_with_dummy_values()
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()
        return original(self)

    DistributedOptimizer.state_dict = state_dict


def restore_step_when_resharding() -> None:
    """Fix KeyError 'step' on loading a fully reshardable checkpoint into torch's AdamW."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states  # noqa: SLF001

    def set_states(self: Any, parameter: Any, tensors: dict[str, Any]) -> Any:
        group, index = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        return original(self, parameter, {"step": state["step"], **tensors} if "step" in state else tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states  # noqa: SLF001


def separate_steps_after_loading() -> None:
    """Give each parameter a `step` tensor of its own after loading a checkpoint.

    Loading makes all parameters share one tensor, so each later step increments it once a parameter. Silent: the run
    continues with a wrong bias correction.
    """
    original = DistributedOptimizer.load_state_dict

    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()
        return result

    DistributedOptimizer.load_state_dict = load_state_dict


def save_padding_between_buckets() -> None:
    """Write the padding between buckets into fully reshardable checkpoints.

    megatron-core omits the padding, but counts it in the parameters' offsets. Silent but for a warning: all parameters
    after the first bucket load a part of their neighbours' weights and state.
    There is more than one bucket if tied embeddings are on two pipeline stages.
    """
    original = DistributedOptimizer.sharded_param_state_fully_reshardable

    @wraps(original)
    def sharded(self: Any, *arguments: Any, **settings: Any) -> Any:
        sizes = [(buffer, buffer.numel) for buffer in self.buffers]
        sizes += [(bucket, bucket.grad_data.numel()) for buffer in self.buffers for bucket in buffer.buckets]
        unpadded = [holder.numel_unpadded for holder, _ in sizes]
        for holder, size in sizes:
            holder.numel_unpadded = size
        try:
            return original(self, *arguments, **settings)
        finally:
            for (holder, _), size in zip(sizes, unpadded, strict=True):
                holder.numel_unpadded = size

    DistributedOptimizer.sharded_param_state_fully_reshardable = sharded


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
