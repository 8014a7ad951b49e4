"""SGLang plugin that replaces functions which need CUDA.

Does nothing if torch has CUDA. SGLang loads the plugin in each of its processes (entry point `sglang.srt.plugins`).
"""

from __future__ import annotations

from typing import Any

ATTENTION = "torch_native"


def register() -> None:
    """Patch SGLang; it calls this before it reads its arguments."""
    import torch

    if torch.version.cuda is not None:
        return
    import sgl_kernel  # noqa: F401 sets attributes that model files read on import
    from sglang.srt import batch_invariant_ops, server_args
    from sglang.srt.mem_cache.pool_host import common

    from relax_sglang_cpu import float8, lora, murmur, shared_experts, sinks

    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    murmur.define()
    lora.install()
    float8.install()
    sinks.install(ATTENTION)
    shared_experts.install()
    # SGLang ignores seeds without --enable-deterministic-inference, which accepts only CUDA attention backends and uses
    # Triton kernels. On a CPU, batches of the same shape give the same bits without them.
    choices = server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    if ATTENTION not in choices:
        choices.append(ATTENTION)
    batch_invariant_ops.enable_batch_invariant_mode = _no_batch_invariance


def _allocate(dims: Any, dtype: Any, device: Any, pin_memory: Any, allocator: Any, *_: Any, **__: Any) -> Any:
    """Allocate host memory without registering it with the CUDA runtime."""
    del device, pin_memory
    return allocator.allocate(dims, dtype=dtype, device="cpu")


def _no_batch_invariance(*_: Any, **__: Any) -> None:
    """Do nothing: the batch-invariant kernels are Triton kernels for GPUs."""
