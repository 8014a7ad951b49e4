"""A plugin of SGLang for a torch without CUDA: what it takes for granted of one with it.

Does nothing beside a torch with CUDA. SGLang loads it in each of its processes (entry point `sglang.srt.plugins`).
"""

from __future__ import annotations

from typing import Any

ATTENTION = "torch_native"


def register() -> None:
    """Called by SGLang before it reads its arguments."""
    import torch

    if torch.version.cuda is not None:
        return
    import sgl_kernel  # noqa: F401 sets what model files read as they are imported
    from sglang.srt import batch_invariant_ops, server_args
    from sglang.srt.mem_cache.pool_host import common

    from relax_sglang_cpu import murmur

    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    murmur.define()
    # Seeds of requests count only with --enable-deterministic-inference, which wants attention from a list of CUDA's,
    # and kernels of Triton. On a CPU a batch of the same shape gives the same bits without either.
    choices = server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    if ATTENTION not in choices:
        choices.append(ATTENTION)
    batch_invariant_ops.enable_batch_invariant_mode = _no_batch_invariance


def _allocate(dims: Any, dtype: Any, device: Any, pin_memory: Any, allocator: Any, *_: Any, **__: Any) -> Any:
    """Host memory as it is; SGLang would register it with cudart."""
    del device, pin_memory
    return allocator.allocate(dims, dtype=dtype, device="cpu")


def _no_batch_invariance(*_: Any, **__: Any) -> None:
    """Nothing: its kernels are Triton's, for GPUs."""
