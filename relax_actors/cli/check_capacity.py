"""Checks of the memory and the disk that a run needs on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from relax_actors.config import Config
from relax_actors.data.model_folder import ModelFacts, measure
from relax_actors.engines.backends import inference_backend
from relax_actors.engines.sglang.backend import SERVER_BYTES
from relax_actors.errors import ConfigError

CACHED_BYTES = 4
"""Bytes of a number in the key-value cache of a rollout that generates in its own process."""
TRAINER_BYTES, ENGINE_BYTES, REFERENCE_BYTES = 16, 8, 4
"""Bytes a parameter: weights, gradients and optimizer; two sets of weights; one set."""
DELTA_BASE_BYTES, DELTA_COPY_BYTES = 4, 2
"""Bytes a parameter that deltas need besides: two bfloat16 sets in the trainer, one in each actor that follows it."""
PROCESS_BYTES, SIMULATED_BYTES = 700 << 20, 20 << 20
"""Memory of a process besides the model: with torch, with simulated engines."""


def check_memory(config: Config, facts: ModelFacts) -> Iterator[str]:
    """Compare the estimated memory of all processes with this machine's, if training on its CPU."""
    reference = REFERENCE_BYTES if config.computes_reference else 0
    base, copy = (DELTA_BASE_BYTES, DELTA_COPY_BYTES) if config.publishes_deltas else (0, 0)
    # Weights that are sent from memory must not change while training goes on; the base of deltas is such a copy.
    base = base or (ENGINE_BYTES // 2 if config.weights.transport == "torch" else 0)
    following = config.rollout.replicas + (config.roles["actor_fwd"].replicas if "actor_fwd" in config.roles else 0)
    fixed = config.roles["reference"].replicas if "reference" in config.roles else 0
    engines = (ENGINE_BYTES + copy) * following + REFERENCE_BYTES * fixed
    critic = TRAINER_BYTES if config.critic is not None else 0
    model = facts.parameters * (TRAINER_BYTES + reference + base + engines + critic) + teacher_bytes(config)
    process = PROCESS_BYTES if config.simulate is None else SIMULATED_BYTES
    # The ranks of a group are processes beside the actor's.
    groups = [config.trainer.ranks] if config.critic is None else [config.trainer.ranks, config.critic.ranks]
    trained = sum(ranks + 1 if ranks > 1 else 1 for ranks in groups)
    processes = process * (trained + following + fixed)
    starts_servers = inference_backend(config).server_module(config)
    servers = SERVER_BYTES * config.rollout.replicas if starts_servers else 0
    need, have = model + processes + servers, _memory_of_machine()
    text = f"{facts.parameters / 1e6:.2f} M parameters, about {need >> 20} MiB of memory"
    if have and need > have and config.trainer.device in ("auto", "cpu"):
        msg = f"model: {text}, this machine has {have >> 20} MiB; use a smaller model or fewer replicas"
        raise ConfigError(msg)
    yield text
    if config.simulate is None and not starts_servers and facts.cached:
        samples = config.rollout.max_concurrent_prompts * config.rollout.group_size
        size = samples * facts.cached * CACHED_BYTES / (1 << 20)
        yield f"besides, keys and values of {samples} samples: {size:.3g} MiB a token in each rollout actor"


def teacher_bytes(config: Config) -> int:
    """Memory of the teachers that run here, in bytes."""
    section = config.roles.get("teacher")
    folder = section.options.get("model") if section is not None else None
    if section is None or folder is None or not (Path(folder) / "config.json").exists():
        return 0
    return measure(Path(folder)).parameters * REFERENCE_BYTES * section.replicas


def _existing(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def check_disk(config: Config, facts: ModelFacts) -> Iterator[str]:
    """Compare the estimated size of checkpoints and weights with the free disk space."""
    models = 1 if config.critic is None else 2
    checkpoints = models * facts.parameters * 12 * (config.trainer.keep_checkpoints + 1)
    weights = facts.parameters * 4 * (config.staleness.max + 6 + 2 * ("reference" in config.roles))
    need = checkpoints + weights
    free = shutil.disk_usage(_existing(config.folder.absolute())).free
    if need > free:
        msg = (
            f"run.folder {config.folder} needs about {need >> 20} MiB, {free >> 20} MiB are free; free space, or "
            "choose another run.folder"
        )
        raise ConfigError(msg)
    yield f"about {need >> 20} MiB of disk"


def _memory_of_machine() -> int:
    """Return the memory of this machine in bytes; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal")), 0)
