"""Errors of megatron-core 0.16 that are met here, each mended by one function, and each with a test that shows it.

All but the last two hit GPUs too: MoE and torch's AdamW where there is no TransformerEngine, and checkpoints anywhere.
Those two belong to the CPU. A newer megatron-core that has its own remedy is left alone.
"""

from __future__ import annotations

import queue
from functools import wraps
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils, token_dispatcher

_DONE = "_relax_actors_mended"


def apply(*, on_cpu: bool) -> None:
    """Mend all of it; a second call changes nothing."""
    name_of_missing_gemm()
    if not getattr(DistributedOptimizer, _DONE, False):
        state_before_the_first_step()
        step_of_resharded_state()
        step_of_each_parameter()
        state_of_padded_buckets()
        setattr(DistributedOptimizer, _DONE, True)
    write_without_processes()
    if on_cpu:
        splits_as_numbers()
        generator_of_the_cpu()


def name_of_missing_gemm() -> None:
    """Every MoE without TransformerEngine ends in NameError: the router asks for a name that only that import sets."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def state_before_the_first_step() -> None:
    """`DistributedOptimizer.state_dict` asserts that torch's AdamW has made a step already: begin its state at step 0.

    A checkpoint is also written of version 0.
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


def step_of_resharded_state() -> None:
    """Loading a fully reshardable checkpoint into torch's AdamW ends in KeyError 'step', which lies elsewhere."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states  # noqa: SLF001

    def set_states(self: Any, parameter: Any, tensors: dict[str, Any]) -> Any:
        group, place = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        return original(self, parameter, {"step": state["step"], **tensors} if "step" in state else tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states  # noqa: SLF001


def step_of_each_parameter() -> None:
    """Loading gives all parameters one and the same `step`, so that each later step counts once a parameter.

    Silent: the run goes on with a bias correction that is wrong.
    """
    original = DistributedOptimizer.load_state_dict

    def load_state_dict(self: Any, state_dict: Any) -> Any:
        found = original(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()
        return found

    DistributedOptimizer.load_state_dict = load_state_dict


def state_of_padded_buckets() -> None:
    """A fully reshardable checkpoint leaves out the padding between buckets, yet counts it in the parameters' places.

    Silent but for a warning: all parameters behind the first bucket get a part of their neighbours' weights and state.
    There is more than one bucket where tied embeddings are on two stages of a pipeline.
    """
    original = DistributedOptimizer.sharded_param_state_fully_reshardable

    @wraps(original)
    def sharded(self: Any, *arguments: Any, **settings: Any) -> Any:
        sizes = [(buffer, buffer.numel) for buffer in self.buffers]
        sizes += [(bucket, bucket.grad_data.numel()) for buffer in self.buffers for bucket in buffer.buckets]
        kept = [holder.numel_unpadded for holder, _ in sizes]
        for holder, size in sizes:
            holder.numel_unpadded = size
        try:
            return original(self, *arguments, **settings)
        finally:
            for (holder, _), size in zip(sizes, kept, strict=True):
                holder.numel_unpadded = size

    DistributedOptimizer.sharded_param_state_fully_reshardable = sharded


def write_without_processes() -> None:
    """A synchronous save starts one process to hold a queue and forks another to write; here the caller writes.

    The fork of a process with threads and collectives may hang, and does for ever if psutil is missing.
    """
    filesystem_async._results_queue = queue.Queue()  # noqa: SLF001
    writer = filesystem_async.FileSystemWriterAsync

    def write(transforms: Any, _: Any, rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:  # noqa: ARG001
        found: dict[int, Any] = {}
        while not results.empty():  # of a save that was broken off
            results.get_nowait()
        for i, bucket in enumerate(buckets):
            written: queue.Queue[Any] = queue.Queue()
            open_ones: queue.Queue[Any] = queue.Queue()
            open_ones.put(i)
            writer.write_preloaded_data(
                transforms,
                local_proc_idx=i,
                write_bucket=bucket,
                results_queue=written,
                count_queue=open_ones,
                use_fsync=True,
            )
            _, outcome = written.get_nowait()
            if isinstance(outcome, Exception):
                results.put(outcome)
                return
            found[i] = outcome
        results.put(found)

    writer.write_preloaded_data_multiproc = staticmethod(write)


class _Splits(list[int]):
    """Split sizes that `all_to_all_single` takes, in the words of a tensor."""

    def tolist(self) -> list[int]:
        return list(self)


def splits_as_numbers() -> None:
    """What is on the CPU already is left a tensor where split sizes are wanted as numbers: TypeError."""

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001, FBT001, FBT002
        return _Splits(tensor.tolist()) if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moved


def generator_of_the_cpu() -> None:
    """The state of the random numbers, which two functions take from CUDA's generators by name."""

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:  # noqa: ARG001, FBT001, FBT002
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:  # noqa: ARG001, FBT001, FBT002
        torch.set_rng_state(state)

    random._get_cuda_rng_state = get_state  # noqa: SLF001
    random._set_cuda_rng_state = set_state  # noqa: SLF001
