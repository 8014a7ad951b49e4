"""Timings with a random model of the shape of Qwen3-0.6B."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu_checks.engines import LIMITS
from gpu_checks.frame import Failed, Figures, Place, check, require
from gpu_checks.models import compare
from gpu_checks.workload import EXPERTS, MANY_EXPERTS, QWEN3_0_6B, TINY, batch, config_of, nothing, start
from relax_actors.config import Config
from relax_actors.engines.protocols import GenerationRequest, TrainSample, train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import tensors_of
from relax_actors.engines.transformers.engine import TransformersEngine

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12, "4090": 165e12}
"""Dense bfloat16 operations a second, from the makers' data sheets."""
KINDS = {
    "matrix products": ("gemm", "cutlass", "nvjet", "matmul", "cublas", "sm90_xmma"),
    "attention": ("flash", "fmha", "attention", "softmax"),
    "optimizer": ("multi_tensor", "adam"),
    "copies": ("memcpy", "memset", "copy"),
    "reductions": ("reduce",),
    "element by element": ("elementwise", "vectorized", "unrolled"),
}
"""Parts of the names of kernels, by kind; the first that fits counts."""
MIB = 1 << 20


def config_for(place: Place, backend: str, *, deterministic: bool = False) -> Config:
    """Return a run in bfloat16 on a GPU."""
    return config_of(
        place.folder / backend,
        QWEN3_0_6B if place.on_gpu else TINY,
        place.device if backend == "torch" else "auto",
        deterministic=deterministic,
        backend=backend,
        precision="bfloat16" if place.on_gpu else "float32",
        max_tokens_per_microbatch=16384,
    )


def batches(place: Place, count: int) -> list[list[TrainSample]]:
    """Return batches: on a GPU 32 sequences of about 1,000 tokens."""
    size = {"groups": 8, "prompt": 256, "completion": 1024, "vocabulary": 151936} if place.on_gpu else {}
    return [batch(n, **size) for n in range(count)]


def synchronised() -> float:
    """Return the time when the GPU has done what was asked."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = synchronised()
    work()
    return synchronised() - began


def training(place: Place, backend: str) -> Figures:
    """Time steps: tokens a second, memory, and the share of the GPU's peak that the model's products would take."""
    engine = start(config_for(place, backend), initialise=False)
    work = batches(place, 4)
    train(engine, work[0], 0, nothing)
    if place.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(partial(train, engine, one, n, nothing)) for n, one in enumerate(work[1:], 1)]
    tokens = [sum(len(sample) for sample in one) for one in work[1:]]
    rate = statistics.median(t / s for t, s in zip(tokens, seconds, strict=True))
    figures: Figures = {"tokens_per_second": round(rate), "step_seconds": statistics.median(seconds)}
    if place.on_gpu:
        figures["peak_memory_mib"] = torch.cuda.max_memory_allocated() // MIB
        peak = next((peak for kind, peak in PEAK.items() if kind in torch.cuda.get_device_name()), None)
        if peak is not None:
            length = statistics.mean(len(sample) for sample in work[1])
            figures["model_flops_utilisation"] = rate * operations_per_token(length) / peak
    return figures | kernels_of(partial(train, engine, work[-1], 9, nothing), place)


def operations_per_token(length: float) -> float:
    """Floating-point operations of forward and backward of a token of QWEN3_0_6B in sequences of `length` tokens.

    6 for each weight of a matrix (the head, not the embedding), and 6 times the width of attention times the length:
    12 without the causal mask, as PaLM (arXiv 2204.02311, appendix B) counts.
    """
    shape = QWEN3_0_6B
    width = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    layer = shape["hidden_size"] * (2 * width + 2 * keys + 3 * shape["intermediate_size"])
    matrices = shape["num_hidden_layers"] * layer + shape["hidden_size"] * shape["vocab_size"]
    return 6.0 * matrices + 6.0 * shape["num_hidden_layers"] * width * length


def kernels_of(work: Callable[[], object], place: Place) -> Figures:
    """Return the share of the GPU's time that each kind of kernel takes, and the ten longest kernels in the log."""
    if not place.on_gpu:
        return {}
    began = synchronised()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        work()
        wall = (synchronised() - began) * 1e6
    found = profiler.key_averages()
    print(found.table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=90))
    print(found.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))
    spent: dict[str, float] = defaultdict(float)
    kernels = 0
    for event in found:
        if event.device_type == DeviceType.CUDA:
            kind = next((k for k, parts in KINDS.items() if any(part in event.key.lower() for part in parts)), "other")
            spent[kind] += event.self_device_time_total
            kernels += event.count
    busy = sum(spent.values())
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    shares: Figures = {f"share_{kind}": round(part / busy, 3) for kind, part in ordered}
    return shares | {"kernels": kernels, "gpu_busy": round(busy / wall, 3)}


@check("speed_torch", seconds=300, is_alone=True)
def speed_torch(place: Place) -> Figures:
    """Training with the torch engine: tokens a second, memory, utilisation, kernels."""
    return training(place, "torch")


@check("speed_megatron", seconds=300, is_alone=True)
def speed_megatron(place: Place) -> Figures:
    """Training with Megatron-Core: tokens a second, memory, utilisation, kernels."""
    return training(place, "megatron")


@check("grouped_experts", seconds=300, is_alone=True)
def grouped_experts(place: Place) -> Figures:
    """Megatron-Core's experts multiplied together and one by one: the same steps, and seconds a step of both."""
    figures, found = Figures(), {}
    work = batches(place, 4)
    for grouped in (False, True):
        config = config_of(
            place.folder / str(grouped),
            MANY_EXPERTS if place.on_gpu else EXPERTS,
            "auto",
            backend="megatron",
            precision="bfloat16" if place.on_gpu else "float32",
            max_tokens_per_microbatch=16384,
            megatron={"grouped_experts": grouped},
        )
        engine = start(config)
        steps = [dict(train(engine, work[0], 0, nothing).metrics)]
        began = synchronised()
        steps += [dict(train(engine, one, n, nothing).metrics) for n, one in enumerate(work[1:], 1)]
        name = "together" if grouped else "one_by_one"
        figures[f"step_seconds_{name}"] = (synchronised() - began) / len(work[1:])
        found[name] = steps
        del engine
    limit = LIMITS["bfloat16" if place.on_gpu else "float32"]
    return figures | compare(found["one_by_one"], found["together"], limit, "together")


@check("release_torch", seconds=300, is_alone=True)
def release_torch(place: Place) -> Figures:
    """A torch trainer that leaves the device between two steps and returns: the same bits; memory and seconds."""
    return release(place, "torch")


@check("release_megatron", seconds=300, is_alone=True)
def release_megatron(place: Place) -> Figures:
    """A Megatron trainer that leaves the device between two steps and returns: the same bits; memory and seconds."""
    require("megatron")
    return release(place, "megatron")


def release(place: Place, backend: str) -> Figures:
    """Train with and without leaving the device, a CPU for the disk.

    Raises:
        Failed: the weights differ, or memory stays on the GPU.
    """
    config, prints = config_for(place, backend, deterministic=True), []
    figures: Figures = {}
    folder = None if place.on_gpu else place.folder / "away"
    for leaves in (True, False):
        engine: Any = start(config)
        for step, samples in enumerate(batches(place, 2)):
            if step and leaves:
                held = memory(place)
                figures["release_seconds"] = timed(partial(engine.release_memory, folder))
                figures |= {"held_mib": held, "left_mib": memory(place)}
                if place.on_gpu and memory(place) > held // 4:
                    msg = f"{memory(place)} of {held} MiB stay on the GPU"
                    raise Failed(msg)
                engine.publish(place.folder / "away.safetensors")  # read while it is away
                figures["resume_seconds"] = timed(engine.resume_memory)
            train(engine, samples, step, nothing)
            engine.publish(place.folder / "published.safetensors")
        prints.append(engine.fingerprint())
        del engine
    if len(set(prints)) > 1:
        msg = f"{prints[0]} after leaving the GPU, {prints[1]} without"
        raise Failed(msg)
    return figures


def memory(place: Place) -> int:
    """Return the MiB of GPU memory that torch has reserved in this process."""
    return torch.cuda.memory_reserved() // MIB if place.on_gpu else 0


@check("speed_generation", seconds=300, is_alone=True)
def speed_generation(place: Place) -> Figures:
    """Generation with the transformers engine: tokens a second, memory."""
    config = config_for(place, "torch")
    trainer = TorchEngine(config)
    file = place.folder / "model.safetensors"
    publish = timed(partial(trainer.publish, file))
    print_of = trainer.fingerprint()
    size = file.stat().st_size
    del trainer
    dtype = getattr(torch, config.trainer.precision)
    engine = TransformersEngine(config.model_path, place.device, dtype)
    load = timed(lambda: engine.load(0, print_of, [file]))
    prompts, samples, tokens = (16, 8, 128) if place.on_gpu else (4, 4, 16)
    vocabulary = int(engine.model.config.vocab_size)
    ids = np.random.default_rng(0).integers(0, vocabulary, (prompts, 64)).astype(np.int32)
    requests = [GenerationRequest(p, n, samples, 1.0, 1.0, tokens, frozenset()) for n, p in enumerate(ids)]
    engine.generate(requests[:1], nothing)
    seconds = timed(lambda: engine.generate(requests, nothing))
    figures: Figures = {
        "tokens_per_second": round(prompts * samples * tokens / seconds),
        "samples": prompts * samples,
        "parameters": sum(tensor.numel() for tensor in tensors_of(engine.model).values()),
        "publish_seconds": publish,
        "load_seconds": load,
        "weights_mib": size // MIB,
    }
    if place.on_gpu:
        figures["peak_memory_mib"] = torch.cuda.max_memory_allocated() // MIB
    short = [replace(request, max_tokens=16) for request in requests]
    return figures | kernels_of(lambda: engine.generate(short, nothing), place)
