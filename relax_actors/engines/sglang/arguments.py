"""What a server is started with, from the run's configuration alone."""

from __future__ import annotations

from relax_actors.config import Config
from relax_actors.data.model_folder import ModelFacts

CPU_TOKENS = 65536
STREAM_LEAST, STREAM_MOST = 4, 32


def server_arguments(config: Config, facts: ModelFacts, port: int, *, cuda: bool) -> list[str]:
    """Arguments of `sglang.launch_server`, but for the key.

    Args:
        config: the run's.
        facts: of its model.
        port: on the loopback interface.
        cuda: whether it computes on a GPU.
    """
    rollout, settings = config.rollout, config.rollout.sglang
    dtype = config.trainer.precision if settings.dtype == "auto" else settings.dtype
    samples = rollout.max_concurrent_prompts * rollout.group_size
    values: dict[str, object] = {
        "model-path": config.model_path.absolute(),
        # Weights come by version, verified, before anything is served.
        "load-format": "dummy",
        "dtype": dtype,
        "device": "cuda" if cuda else "cpu",
        "host": "127.0.0.1",
        "port": port,
        "context-length": facts.context_length,
        "max-running-requests": samples,
        "tensor-parallel-size": settings.tensor_parallel,
        "grammar-backend": "none",
        "random-seed": config.run.seed,
        "log-level-http": "warning",
    }
    flags = ["skip-tokenizer-init", "incremental-streaming-output"]
    tokens = settings.kv_tokens
    if not cuda:
        values["attention-backend"] = "torch_native"
        tokens = tokens or min(CPU_TOKENS, samples * facts.context_length)
        flags.append("sleep-on-idle")
    if tokens is not None:
        values["max-total-tokens"] = max(tokens, facts.context_length)
    if settings.memory_fraction is not None:
        values["mem-fraction-static"] = settings.memory_fraction
    if config.trainer.router_replay:
        flags.append("enable-return-routed-experts")
    if config.run.deterministic:
        flags.append("enable-deterministic-inference")
    found = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    return [*found, *(f"--{flag}" for flag in flags), *settings.arguments]


def stream_interval(max_tokens: int) -> int:
    """Tokens after which a server tells what it has of a sample."""
    return min(STREAM_MOST, max(STREAM_LEAST, max_tokens // 8))
