"""Compare the log-probs of trained tokens from all logits at once and chunk by chunk: peak memory and seconds.

    python benchmarks/vocabulary.py [--tokens 8192] [--vocabulary 151936] [--hidden 128] [--device cuda]

Forward and backward of an output head and the log-probs of its tokens, each way in a process of its own. "All logits"
is the head of the model and `gather - logsumexp`, as autograd differentiates it. Memory is the peak above weights,
gradients and hidden states: of the process on a CPU, of the allocator on CUDA.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from relax_actors.algorithms.vocabulary import Head, score_tokens

WAYS = ("all logits", "chunks")
MIB = 1 << 20


def all_logits(hidden: Tensor, weight: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the log-probs of tokens from all logits at once."""
    logits = (hidden.to(dtype) @ weight.to(dtype).T).float()
    return logits.gather(-1, ids)[:, 0] - logits.logsumexp(-1)


def chunks(hidden: Tensor, weight: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the log-probs of tokens as the engines compute them."""
    return score_tokens(hidden, ids, 1.0, head=Head(weight, dtype=dtype)).logprobs[:, 0]


def peak(device: str) -> float:
    """Return the largest memory so far in MiB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass(frozen=True)
class Size:
    """Sizes of a measurement, and where and how products are computed."""

    tokens: int
    vocabulary: int
    hidden: int
    device: str
    dtype: str


def measure(way: str, size: Size) -> dict[str, float]:
    """Measure one way in this process; on a CPU a peak is that of the process so far."""
    compute: Callable[..., Tensor] = {"all logits": all_logits, "chunks": chunks}[way]
    torch.manual_seed(1)
    hidden = torch.randn(size.tokens, size.hidden, device=size.device, requires_grad=True)
    weight = torch.randn(size.vocabulary, size.hidden, device=size.device).div_(size.hidden**0.5)
    weight.requires_grad_()
    ids = torch.randint(size.vocabulary, (size.tokens, 1), device=size.device)
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
    if size.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, began = peak(size.device), time.perf_counter()
    loss = compute(hidden, weight, ids, getattr(torch, size.dtype)).sum()
    torch.autograd.backward(loss)
    value = float(loss.detach())
    if size.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {"mib": peak(size.device) - before, "seconds": seconds, "loss": value, "norm": float(weight.grad.norm())}


def main() -> None:
    """Run both ways and print what they need."""
    parser = argparse.ArgumentParser(description="memory of log-probs over a large vocabulary")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--only", choices=WAYS, help="measure one way")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.way is not None:
        size = Size(chosen.tokens, chosen.vocabulary, chosen.hidden, chosen.device, chosen.dtype)
        sys.stdout.write(json.dumps(measure(chosen.way, size)))
        return
    for way in WAYS if chosen.only is None else (chosen.only,):
        command = [sys.executable, *sys.argv, "--way", way]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        sys.stdout.write(
            f"{way:>10}: {found['mib']:8.0f} MiB, {found['seconds']:6.2f} s, loss {found['loss']:.2f}, "
            f"gradient norm {found['norm']:.4f}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
