"""A run on GPUs is simulated with the times of a file that describes a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_actors.cli.borrowed_times import with_times_of
from relax_actors.config import Config, load_config
from relax_actors.errors import ConfigError
from relax_actors.simulation.durations import calibrated
from tests.support.cluster_examples import FOLDER
from tests.support.running import relax_here

CLUSTERS = FOLDER.parent / "simulate"
DENSE, OMNI = CLUSTERS / "qwen3_4b_16_h800.toml", CLUSTERS / "qwen3_omni_30b_16_h800.toml"


def borrowed(name: str, times: Path, *settings: str) -> Config:
    return with_times_of(calibrated(load_config(times)), load_config(FOLDER / f"{name}.toml", list(settings)))


@pytest.mark.parametrize(
    ("name", "times"), [("qwen3_4b_async", DENSE), ("qwen3_vl_30b_deepeyes", OMNI), ("qwen3_omni_30b", OMNI)]
)
def test_rows_gpus_and_staleness_are_those_of_the_run(name: str, times: Path) -> None:
    config, cluster = load_config(FOLDER / f"{name}.toml"), calibrated(load_config(times))
    simulated = borrowed(name, times)
    assert simulated.simulate is not None
    assert cluster.simulate is not None
    assert (simulated.simulate.devices_of("rollout"), simulated.simulate.devices_of("trainer")) == (8, 8)
    assert simulated.simulate.staleness == (0, config.staleness.max)
    assert simulated.trainer.prompts_per_step == config.trainer.prompts_per_step
    assert simulated.simulate.generation.token_seconds == cluster.simulate.generation.token_seconds
    rows = config.trainer.prompts_per_step / cluster.trainer.prompts_per_step
    before = cluster.simulate.training.device_seconds
    assert before is not None
    assert simulated.simulate.training.device_seconds == pytest.approx(before * rows)


def test_answers_are_as_long_as_the_rollout_allows() -> None:
    simulated = borrowed("qwen3_4b_async", DENSE, "rollout.max_tokens=1000")
    assert simulated.simulate is not None
    assert simulated.simulate.generation.tokens.most == 1000


@pytest.mark.parametrize(
    "settings", [("placement.colocate=[['rollout','trainer']]",), ("trainer.device=cpu",), ("rollout.device=cpu",)]
)
def test_run_without_gpus_for_each_side_is_refused(settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"--times.*\[simulate\] of its own"):
        borrowed("qwen3_4b_async", DENSE, *settings)


def test_section_in_the_wrong_file_is_refused() -> None:
    run, cluster = load_config(FOLDER / "qwen3_4b_async.toml"), load_config(DENSE)
    with pytest.raises(ConfigError, match="examples/simulate"):
        with_times_of(run, run)
    with pytest.raises(ConfigError, match="leave out --times"):
        with_times_of(cluster, cluster)


def test_settings_that_follow_from_the_run_are_refused(tmp_path: Path) -> None:
    for setting, remedy in [("simulate.staleness=[0,4]", "staleness.max"), ("simulate.devices=4", "replicas")]:
        arguments = (str(FOLDER / "qwen3_4b_async.toml"), "--times", str(DENSE), setting)
        done = relax_here("simulate", *arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert setting.partition("=")[0] in done.stderr
        assert remedy in done.stderr


def test_times_are_refused_with_modelled_loads(tmp_path: Path) -> None:
    done = relax_here("simulate", str(DENSE), "--times", str(DENSE), "--autoscaler", cwd=tmp_path)
    assert done.returncode == 2
    assert "leave out one" in done.stderr
