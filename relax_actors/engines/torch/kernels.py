"""How torch computes in a process of ours."""

from __future__ import annotations

import os

import torch

from relax_actors.config.schema import RunSection


def set_up(run: RunSection) -> None:
    """Set the number of threads, and with run.deterministic kernels that give the same bits again.

    On a CPU with one thread they do anyway; on CUDA this costs speed. Operations that have no such kernel warn.
    """
    torch.set_num_threads(run.threads)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
        # Its backward pass has no deterministic form.
        torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)
