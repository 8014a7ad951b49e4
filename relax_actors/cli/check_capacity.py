"""Checks of the memory and the disk that a run needs on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from relax_actors.cli.machine import has_gpu
from relax_actors.config import Config
from relax_actors.config.training import CriticSection, TrainerSection
from relax_actors.data.model_folder import ModelFacts, measure
from relax_actors.engines.backends import inference_backend
from relax_actors.engines.sglang.backend import SERVER_BYTES
from relax_actors.errors import ConfigError
from relax_actors.roles import spec_of

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory limit of a container."""
CACHED_BYTES = 4
"""Bytes of a number in the key-value cache of a rollout that generates in its own process."""
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a weight, by precision."""
STATE_BYTES = 8
"""Bytes a parameter of AdamW's state, which is in float32."""
PROCESS_BYTES, SIMULATED_BYTES = 700 << 20, 20 << 20
"""Memory of a process besides the model: with torch, with simulated engines."""


def check_memory(config: Config, facts: ModelFacts, here: Collection[str]) -> Iterator[str]:
    """Compare the estimated memory of the processes that start on this machine with what it has.

    Weights and caches of roles on GPUs are not counted.

    Args:
        config: configuration of the run.
        facts: size and shape of the model.
        here: roles whose actors start on this machine.

    Raises:
        ConfigError: they need more.
    """
    used = {role: size for role, size in memory_of_roles(config, facts).items() if role in here}
    need, have = sum(used.values()), memory_of_machine()
    parts = ", ".join(f"{role} {size >> 20}" for role, size in used.items())
    if have and need > have:
        msg = (
            f"the roles on this machine need about {need >> 20} MiB of memory ({parts}), it has {have >> 20} MiB; use "
            "a smaller model, fewer replicas or ranks, or other machines for some roles (`relax node`)"
        )
        raise ConfigError(msg)
    if used:
        yield f"memory: about {need >> 20} MiB on this machine ({parts})"
    if config.simulate is None and "rollout" in here and not _has_servers(config) and facts.cached:
        samples = config.rollout.max_concurrent_prompts * config.rollout.group_size
        size = samples * facts.cached * CACHED_BYTES / (1 << 20)
        yield f"besides, keys and values of {samples} samples: {size:.3g} MiB a token in each rollout actor"


def memory_of_roles(config: Config, facts: ModelFacts) -> dict[str, int]:
    """Return the bytes of memory that the actors of each role with an engine need, outside of GPUs.

    Each process has a share of its own. Besides, in bytes a parameter:

    - a trainer: weights, gradients and the optimizer's state. The torch engine computes from float32 weights; those of
      Megatron-Core are in `trainer.precision`, with weights and gradients of the optimizer in float32 besides;
    - a rollout: the weights in use and the next ones, in float32, or in the precision of an SGLang server;
    - a role that scores: float32 weights; twice where it follows the trainer.
    """
    rollout, published = config.rollout, WEIGHT_BYTES[config.trainer.precision]
    process = PROCESS_BYTES if config.simulate is None else SIMULATED_BYTES
    # A follower of deltas keeps a copy of the published weights, to which they are added.
    follower = 2 * WEIGHT_BYTES["float32"] + (published if config.publishes_deltas else 0)
    found = {"trainer": _trained(config, config.trainer, facts, process)}
    if on_cpu(config.trainer.device):
        found["trainer"] += facts.parameters * _besides(config, published)
    if config.critic is not None:
        found["critic"] = _trained(config, config.critic, facts, process)
    generating = follower
    if _has_servers(config):
        dtype = rollout.sglang.dtype if rollout.sglang.dtype != "auto" else config.trainer.precision
        generating = 2 * WEIGHT_BYTES[dtype]
    elif rollout.backend == "sglang":
        generating = 0  # servers elsewhere
    each = process + (facts.parameters * generating if on_cpu(rollout.device) else 0)
    found["rollout"] = rollout.replicas * (each + (SERVER_BYTES if _has_servers(config) else 0))
    for name, section in config.roles.items():
        device = section.options.get("device", "auto")
        if not spec_of(config, name).device:
            continue
        single = teacher_parameters(config) * WEIGHT_BYTES["float32"] if name == "teacher" else 0
        if name != "teacher":
            single = facts.parameters * (WEIGHT_BYTES["float32"] if name == "reference" else follower)
        found[name] = section.replicas * (process + (single if on_cpu(str(device)) else 0))
    return found


def _trained(config: Config, section: TrainerSection | CriticSection, facts: ModelFacts, process: int) -> int:
    """Return the memory of a trainer or critic with its ranks."""
    ranks, layout = section.ranks, section.megatron
    processes = process * (ranks + 1 if ranks > 1 else 1)  # ranks of a group are processes beside the actor's
    if not on_cpu(section.device) or config.simulate is not None:
        return processes
    weight = WEIGHT_BYTES["float32"]
    model, state = 2 * weight, STATE_BYTES
    if section.backend == "megatron" and config.trainer.precision == "bfloat16":
        model, state = WEIGHT_BYTES["bfloat16"] + weight, STATE_BYTES + weight
    copies = max(1, ranks // (layout.tensor_parallel * layout.pipeline_parallel))
    return processes + facts.parameters * (model * copies + state * (1 if layout.distributed_optimizer else copies))


def _besides(config: Config, published: int) -> int:
    """Return the bytes a parameter that a trainer holds besides the model and its optimizer."""
    reference = WEIGHT_BYTES["float32"] if config.computes_reference else 0
    # Deltas are computed between two versions. Weights sent from memory must not change while training goes on.
    if config.publishes_deltas:
        return reference + 2 * published
    return reference + (published if config.weights.transport == "torch" else 0)


def _has_servers(config: Config) -> bool:
    """Whether the run starts an inference server for each rollout actor."""
    return bool(inference_backend(config).server_module(config))


def on_cpu(device: str) -> bool:
    """Whether a device is the CPU of this machine."""
    return device == "cpu" or (device == "auto" and not has_gpu())


def teacher_parameters(config: Config) -> int:
    """Parameters of the model of the teachers that run here; 0 without any."""
    section = config.roles.get("teacher")
    folder = section.options.get("model") if section is not None else None
    if folder is None or not (Path(folder) / "config.json").exists():
        return 0
    return measure(Path(folder)).parameters


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


def memory_of_machine() -> int:
    """Return the memory that this process may use in bytes: of the machine, or of its control group; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    machine = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal")), 0)
    for limit in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # there is none, or its text is "max"
            machine = min(machine, int(limit.read_text()))
    return machine
