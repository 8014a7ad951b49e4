"""Checks of the memory and the disk that a run needs on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from relax_actors.checks.machine import has_gpu
from relax_actors.config import Config
from relax_actors.config.training import CriticSection, TorchSection, TrainerSection
from relax_actors.data.checked_run import CheckedRun
from relax_actors.data.model_folder import ModelFacts, measure
from relax_actors.devices.machine import memory_of_machine
from relax_actors.engines.backends import footprints, inference_backend
from relax_actors.engines.protocols.footprint import (
    ADAPTER_SHARE,
    PROCESS_BYTES,
    WEIGHT_BYTES,
    Footprint,
    follower_bytes,
    node_copy_bytes,
    served_bytes,
)
from relax_actors.errors import ConfigError
from relax_actors.roles import replicas, spec_of
from relax_actors.roles.gpus import device_of_role

LIGHT = Footprint(process_bytes=100 << 20)
"""An actor without an engine."""
OWN_MODELS = ("teacher", "judge", "reward_model")
"""Roles with a model of their own, the folder of their option `model`."""
CACHED_BYTES = 4
"""Bytes of a number in the key-value cache of a rollout that generates in its own process."""


def check_memory(run: CheckedRun, facts: ModelFacts) -> Iterator[str]:
    """Compare the memory of processes on this machine with what it has."""
    config, here = run.config, run.here
    used = {role: size for role, size in memory_of_roles(config, facts).items() if role in here}
    if shared := shared_bytes(config, here, facts):
        used["copies of weights that they share"] = shared
    need, have = sum(used.values()), memory_of_machine().total
    parts = ", ".join(f"{role} {size >> 20}" for role, size in used.items())
    if have and need > have:
        msg = (
            f"the roles on this machine need about {need >> 20} MiB of memory ({parts}), it has {have >> 20} MiB; use "
            "a smaller model, fewer replicas or ranks, or other machines for some roles (`relax node`)"
        )
        raise ConfigError(msg)
    if used:
        yield f"memory: about {need >> 20} MiB on this machine ({parts})"
    backend = inference_backend(config)
    generates_here = backend.server(config) is None and backend.footprint(config).parameter_bytes
    if "rollout" in here and facts.cached and generates_here:
        samples = config.rollout.max_concurrent_prompts * config.most_samples
        size = samples * facts.cached * CACHED_BYTES / (1 << 20)
        yield f"besides, keys and values of {samples} samples: {size:.3g} MiB a token in each rollout actor"


def memory_of_roles(config: Config, facts: ModelFacts) -> dict[str, int]:
    """Return bytes of host memory of each engine role's actors, but for what those of a node share."""
    engines, models = _engines(config), dict[str, int]()
    for role in engines:
        on_host = moves_to_host(config, role) or offloads(config, role)
        is_here = on_cpu(device_of_role(config, role) or "auto") or on_host
        model = engine_bytes(config, role, facts) if is_here else 0
        models[role] = model if moves_to_disk(config, role) else replicas(config, role) * model
    for group in config.placement.colocate:
        movable = (role for role in group if role in models and moves_to_disk(config, role))
        models |= dict.fromkeys(sorted(movable, key=models.__getitem__)[:-1], 0)
    others = {role: host_bytes(config, role) + copied_bytes(config, role, facts) for role in engines}
    return {role: replicas(config, role) * others[role] + models[role] for role in engines}


def moves_to_host(config: Config, role: str) -> bool:
    """Return whether a role's actors move GPU memory to the host in turns."""
    return config.placement.leaves_device(role) and not moves_to_disk(config, role)


def moves_to_disk(config: Config, role: str) -> bool:
    """Return whether a role's actors move their memory to files."""
    has_server = role == "rollout" and inference_backend(config).server(config) is not None
    return config.placement.leaves_device(role) and config.placement.release == "disk" and not has_server


def offloads(config: Config, role: str) -> bool:
    """Return whether actors of a role keep their memory on the host, but for what computes."""
    return _ranks(config, role).offload


def _ranks(config: Config, role: str) -> TorchSection:
    """Return how ranks of the torch engine share the model of a role, if it has this engine."""
    section = getattr(config, role, None)
    if isinstance(section, TrainerSection | CriticSection) and section.backend == "torch":
        return section.torch
    return TorchSection()


def _engines(config: Config) -> list[str]:
    """Return the roles whose actors have an engine."""
    return [*footprints(config), *(name for name in config.roles if spec_of(config, name).device)]


def engine_bytes(config: Config, role: str, facts: ModelFacts) -> int:
    """Return bytes of an actor's engine on its devices; 0 without an engine."""
    if (footprint := footprints(config).get(role)) is not None:
        # With an adapter the reference is the model without it.
        has_reference = role.startswith("trainer") and config.computes_reference and config.lora is None
        reference = WEIGHT_BYTES["float32"] * _share(config, role) if has_reference else 0
        # A teacher's weights are frozen, so they are there once.
        is_served = footprint.process_bytes > PROCESS_BYTES
        of_writer = served_bytes(config) if is_served else WEIGHT_BYTES["float32"]
        writers = sum(_writers(config, role)) * of_writer
        model = facts.parameters * (footprint.parameter_bytes + reference) + facts.tables * footprint.table_bytes
        return int(model + writers)
    if role not in config.roles or not spec_of(config, role).device:
        return 0
    if role in OWN_MODELS:
        return own_parameters(config, role) * WEIGHT_BYTES["float32"]
    return int(facts.parameters * (WEIGHT_BYTES["float32"] if role == "reference" else follower_bytes(config)))


def _share(config: Config, role: str) -> float:
    """Return an actor's share of the trainer's ranks."""
    megatron = config.trainer.megatron
    if config.trainer_rank is None:
        return 1.0
    return (megatron.own_ranks if role == "trainer" else 1) / megatron.ranks


def host_bytes(config: Config, role: str) -> int:
    """Return the bytes of memory of an actor's processes, and of its servers, besides a model."""
    footprint = footprints(config).get(role)
    if footprint is None:
        footprint = Footprint() if role in config.roles and spec_of(config, role).device else LIGHT
    of_server = footprint.process_bytes - PROCESS_BYTES
    return footprint.processes * footprint.process_bytes + len(_writers(config, role)) * max(of_server, 0)


def copied_bytes(config: Config, role: str, facts: ModelFacts) -> int:
    """Return bytes of host memory for copies of weights that an actor publishes."""
    megatron = config.trainer.megatron
    ranks = {"trainer": megatron.own_ranks, "trainer_rank": 1}.get(role, 0)
    published = WEIGHT_BYTES[config.trainer.precision]
    copies = 2 if config.publishes_deltas else 0  # deltas are computed between two versions
    return facts.parameters * copies * published * ranks // megatron.ranks


def shared_bytes(config: Config, roles: Collection[str], facts: ModelFacts) -> int:
    """Return bytes of host memory for the copies of published weights that a node's actors of some roles share."""
    known = footprints(config)
    scores = (role for role in roles if role in config.roles and role not in (*known, *OWN_MODELS, "reference"))
    needs = {role: known[role].node_bytes for role in roles if role in known}
    needs |= {role: node_copy_bytes(config) for role in scores if spec_of(config, role).device}
    # Experts have other names for an inference server than for other engines, so that they share no file.
    has_names = facts.moe is not None and inference_backend(config).server(config) is not None
    of_server = needs.pop("rollout", 0) if has_names else 0
    return int(facts.parameters * (of_server + max(needs.values(), default=0)))


def on_cpu(device: str) -> bool:
    """Whether a device is the CPU of this machine."""
    return device == "cpu" or (device == "auto" and not has_gpu())


def own_parameters(config: Config, role: str) -> int:
    """Parameters of the model folders that a role names, such as a teacher's; 0 without any."""
    return sum(_sizes_of_models(config, role))


def _sizes_of_models(config: Config, role: str) -> list[int]:
    options = config.roles[role].options
    given, several = options.get("model"), options.get("models")
    folders = [given, *(several.values() if isinstance(several, dict) else ())]
    named = [Path(folder) for folder in folders if isinstance(folder, str | Path)]
    return [measure(folder).parameters for folder in named if (folder / "config.json").exists()]


def _writers(config: Config, role: str) -> list[int]:
    """Return the parameters of each teacher that writes samples in the actors of a role."""
    writes = role == "rollout" and "teacher" in config.roles and config.algorithm.distil.student_share < 1
    return _sizes_of_models(config, "teacher") if writes else []


def _existing(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def check_disk(config: Config, facts: ModelFacts) -> Iterator[str]:
    """Compare the estimated size of checkpoints and weights with the free disk space."""
    models = 1 if config.critic is None else 2
    kept = config.trainer.keep_checkpoints + -(-config.run.keep_steps // config.trainer.checkpoint_every)
    share = 1.0 if config.lora is None else ADAPTER_SHARE
    checkpoints = models * share * facts.parameters * 12 * (kept + 1)
    weights = share * facts.parameters * 4 * (config.staleness.max + 6 + 2 * ("reference" in config.roles))
    merged = facts.parameters * 4 if config.lora is not None and config.lora.export_merged else 0
    need = int(checkpoints + weights + merged)
    free = shutil.disk_usage(_existing(config.folder.absolute())).free
    if need > free:
        msg = (
            f"run.folder {config.folder} needs about {need >> 20} MiB, {free >> 20} MiB are free; free space, or "
            "choose another run.folder"
        )
        raise ConfigError(msg)
    yield f"about {need >> 20} MiB of disk"
