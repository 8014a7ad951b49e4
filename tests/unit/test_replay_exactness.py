"""What a replay says before it computes: whether bits must be equal, and whether this machine has the devices."""

from __future__ import annotations

import pytest

from relax_actors.config import Config, load_config
from relax_actors.errors import ConfigError
from relax_actors.replay.exactness import check_devices, why_inexact
from tests.support.running import TINY

CRITIC = ("algorithm.name=ppo", "algorithm.kl.place=none", "critic.learning_rate=1e-3")


def config_of(*settings: str) -> Config:
    return load_config(TINY, list(settings))


def test_runs_on_the_cpu_and_deterministic_runs_are_exact() -> None:
    assert why_inexact(config_of(*CRITIC), 0) == ""
    assert why_inexact(config_of("trainer.device=cuda", "run.deterministic=true"), 1) == ""
    shown = why_inexact(config_of(*CRITIC, "trainer.device=cpu", "critic.device=cuda"), 1)
    assert shown.startswith("critic.device: kernels of GPUs add up in any order")
    assert why_inexact(config_of(*CRITIC), 1).startswith("trainer.device and critic.device: kernels")


def test_missing_gpu_is_named_before_anything_is_computed() -> None:
    check_devices(config_of("trainer.device=cuda"), 1)
    check_devices(config_of(), 0)
    with pytest.raises(ConfigError, match=r"trainer\.device = 'cuda', and torch can use no GPU here: replay on"):
        check_devices(config_of("trainer.device=cuda"), 0)
