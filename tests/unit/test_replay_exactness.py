"""What a replay says before it computes: whether bits must be equal, and whether this machine has the devices."""

from __future__ import annotations

from typing import Any

import pytest

from relax_actors.cli.replay import replay
from relax_actors.config import Config, load_config
from relax_actors.errors import ConfigError
from relax_actors.replay.exactness import check_devices, why_inexact, why_samples_inexact
from tests.support.running import TINY

H100 = "NVIDIA H100 80GB HBM3"
CRITIC = ("algorithm.name=ppo", "algorithm.kl.place=none", "critic.learning_rate=1e-3")


def config_of(*settings: str) -> Config:
    return load_config(TINY, list(settings))


def test_runs_on_the_cpu_and_deterministic_runs_are_exact() -> None:
    assert why_inexact(config_of(*CRITIC, "trainer.device=cpu", "critic.device=cpu"), "", {}) == ""
    assert why_inexact(config_of("trainer.device=cuda", "run.deterministic=true"), H100, {}) == ""
    shown = why_inexact(config_of(*CRITIC, "trainer.device=cpu", "critic.device=cuda"), H100, {})
    assert shown.startswith("critic.device: kernels of GPUs add up in any order")
    assert why_inexact(config_of(*CRITIC), H100, {}).startswith("trainer.device and critic.device: kernels")


@pytest.mark.parametrize("deterministic", ["true", "false"])
def test_device_that_an_old_run_left_open_is_said_to_round_differently(deterministic: str) -> None:
    shown = why_inexact(config_of(*CRITIC, f"run.deterministic={deterministic}"), "", {})
    assert shown.startswith('trainer.device and critic.device = "auto": the CPU computes here')
    assert "unless the run was trained on a GPU" in shown
    assert "unless the run was trained on a CPU" in why_inexact(config_of("run.deterministic=true"), H100, {})


def test_devices_of_the_checkpoints_around_the_step_decide_where_they_are_recorded() -> None:
    exact, gpu = config_of("run.deterministic=true"), f"cuda ({H100})"
    assert why_inexact(exact, "", {"trainer.device": ("cpu", "cpu")}) == ""
    assert why_inexact(exact, H100, {"trainer.device": (gpu, gpu)}) == ""
    for moved in ((gpu, gpu), ("cpu", gpu), (gpu, "cpu")):
        shown = why_inexact(exact, "", {"trainer.device": moved})
        assert shown.startswith(f"trainer.device: the run computed on {gpu}, and cpu computes here")
    assert "cuda (NVIDIA A100) computes here" in why_inexact(exact, "NVIDIA A100", {"trainer.device": (gpu, gpu)})
    # No checkpoint follows, so nothing says who trained behind the last one.
    assert "unless the run was trained on a GPU" in why_inexact(exact, "", {"trainer.device": ("cpu", "")})


def test_samples_of_a_device_that_is_not_known_may_differ() -> None:
    assert why_samples_inexact("cpu", H100) == ""
    assert "the CPU samples here" in why_samples_inexact("auto", "")
    assert f"cuda ({H100}) samples here" in why_samples_inexact("cuda", H100)


def test_missing_gpu_is_named_before_anything_is_computed() -> None:
    check_devices(config_of("trainer.device=cuda"), 1)
    check_devices(config_of("trainer.device=cuda:1"), 2)
    check_devices(config_of(), 0)
    with pytest.raises(ConfigError, match=r"trainer\.device = 'cuda'.*no GPU here"):
        check_devices(config_of("trainer.device=cuda"), 0)
    with pytest.raises(ConfigError, match=r"trainer\.device = 'cuda:3'.*1 GPU here"):
        check_devices(config_of("trainer.device=cuda:3"), 1)


@pytest.mark.parametrize("options", [{"step": 3}, {"rollout": "3.1", "json": True}])
def test_gradients_that_nothing_would_print_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--gradients .* --json"):
        replay("demo", gradients=True, **options)
