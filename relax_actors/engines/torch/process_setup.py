"""Torch settings of a process: number of threads and deterministic kernels."""

from __future__ import annotations

import os

import torch

from relax_actors.config.run import RunSection


def configure_torch(run: RunSection) -> None:
    """Set the number of threads and, with run.deterministic, kernels that give the same bits in every run.

    On a CPU with one thread this changes no result; on CUDA it costs speed. Operations without a deterministic kernel
    emit a warning. Call it before the first CUDA operation.
    """
    torch.set_num_threads(run.threads)
    # Convolutions of towers, as matrix products: float32 means float32.
    torch.backends.cudnn.allow_tf32 = False
    # It makes a plan for each length of keys, which a generation meets once: more than half of the time of a token.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
        # The backward passes of these attention kernels are not deterministic as long as other operations may pass with
        # a warning; packed sequences have a kernel of their own (`varlen`).
        torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)
        if torch.cuda.is_available():  # the CPU's flash kernel, which the same switch turns off, is deterministic
            torch.backends.cuda.enable_flash_sdp(enabled=False)
