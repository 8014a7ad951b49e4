"""Command-line arguments of a server, derived from the run's configuration."""

from __future__ import annotations

from pathlib import Path

from relax_actors.config import Config
from relax_actors.data.model_folder import ModelFacts
from relax_actors.devices.binding import own_device
from relax_actors.engines.sglang.adapter_form import adapter_arguments
from relax_actors.engines.sglang.quantization import FLOAT8_KERNELS

CPU_TOKENS = 65536
"""Largest default capacity of the key-value cache on a CPU, in tokens."""
MARGIN = 8
"""Tokens that a server keeps free at the end of its context: it refuses prompts that come closer, and cuts answers."""
MIN_STREAM_INTERVAL, MAX_STREAM_INTERVAL = 4, 32


def server_arguments(config: Config, model: Path, facts: ModelFacts, port: int, *, key: str, cuda: bool) -> list[str]:
    """Return the arguments of `sglang.launch_server`, which listens on the loopback interface.

    Requests must have the `key`; `cuda` says that the server computes on a GPU.
    """
    rollout, settings = config.rollout, config.rollout.sglang
    dtype = config.trainer.precision if settings.dtype == "auto" else settings.dtype
    samples = rollout.max_concurrent_prompts * config.most_samples
    values: dict[str, object] = {
        "model-path": model.absolute(),
        # Random weights: the actor loads a verified version before the first request.
        "load-format": "dummy",
        "dtype": dtype,
        "device": "cuda" if cuda else "cpu",
        "host": "127.0.0.1",
        "port": port,
        "context-length": facts.context_length + MARGIN,
        "max-running-requests": settings.max_concurrent_samples or samples,
        "tensor-parallel-size": settings.tensor_parallel,
        "grammar-backend": "none",
        "random-seed": config.run.seed,
        "log-level-http": "warning",
        **_attention_backend(dtype, cuda=cuda),
        **(FLOAT8_KERNELS if cuda and settings.quantization == "fp8" else {}),
        **_reporting_kernels(config, facts, cuda=cuda),
    }
    flags = ["skip-tokenizer-init", "incremental-streaming-output"]
    if config.media is not None:
        flags.append("enable-multimodal")
    tokens = settings.kv_tokens
    if not cuda:
        tokens = tokens or min(CPU_TOKENS, samples * facts.context_length)
        flags.append("sleep-on-idle")
    if tokens is not None:
        values["max-total-tokens"] = max(tokens, facts.context_length + MARGIN)
    if settings.memory_fraction is not None:
        values["mem-fraction-static"] = settings.memory_fraction
    if config.trainer.router_replay:
        flags.append("enable-return-routed-experts")
    if config.model.fp32_lm_head:
        flags.append("enable-fp32-lm-head")
    if cuda and config.placement.leaves_device("rollout"):
        flags += ["enable-memory-saver", "enable-weights-cpu-backup"]
    if config.run.deterministic:
        flags.append("enable-deterministic-inference")
    if cuda and (gpu := device_index(own_device(rollout.device))):
        values["base-gpu-id"] = gpu
    named = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    # One argument, as one key in 64 begins with a dash and would be taken for an option.
    secret = f"--api-key={key}"
    adapter = adapter_arguments(config, cuda=cuda)
    return [*named, *(f"--{flag}" for flag in flags), *adapter, *settings.arguments, secret]


def _reporting_kernels(config: Config, facts: ModelFacts, *, cuda: bool) -> dict[str, object]:
    """Return the argument for kernels that report experts; by default SGLang takes others for gpt-oss."""
    reports = cuda and config.trainer.router_replay and facts.model_type == "gpt_oss"
    return {"moe-runner-backend": "triton"} if reports else {}


def _attention_backend(dtype: str, *, cuda: bool) -> dict[str, object]:
    """Return the argument for the kernels of attention, unless SGLang's default computes this dtype."""
    if not cuda:
        return {"attention-backend": "torch_native"}
    return {"attention-backend": "triton"} if dtype == "float32" else {}  # its defaults compute half precision alone


def device_index(device: str) -> int:
    """Return the number of a torch device such as "cuda:3"; 0 without one."""
    return int(device.partition(":")[2] or 0)


def stream_interval(max_tokens: int) -> int:
    """Return the number of tokens after which a server streams the progress of a sample."""
    return min(MAX_STREAM_INTERVAL, max(MIN_STREAM_INTERVAL, max_tokens // 8))
