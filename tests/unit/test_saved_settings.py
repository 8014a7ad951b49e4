"""Settings in the folder of a run, in place of a TOML file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relax_actors.config import load_config
from relax_actors.config.load import set_by, stages_of
from relax_actors.config.saved import import_path_of
from relax_actors.errors import ConfigError
from relax_actors.replay.settings import with_settings
from relax_actors.runtime.run_folder import RunFolder
from tests.support.running import TINY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = load_config(TINY, [f"run.folder={tmp_path / 'run'}", "algorithm.name=grpo", "algorithm.clip_low=0.15"])
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").save_config(config, str(tmp_path / "modules"))
    return tmp_path / "run"


def test_folder_of_a_run_stands_for_its_configuration(folder: Path) -> None:
    loaded = load_config(folder, ["run.steps=12"])
    assert (loaded.run.folder, loaded.run.steps, loaded.algorithm.clip_low) == (folder, 12, 0.15)
    assert (set_by(folder, ["run.steps=12"]), stages_of(folder)) == ({"run.steps": "override"}, [])
    assert import_path_of(folder) == str(folder.parent / "modules")
    assert import_path_of(folder) in sys.path
    assert import_path_of(TINY) == str(TINY.parent)


def test_folder_with_a_broken_configuration_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"config": 3}')
    with pytest.raises(ConfigError, match="holds no settings of a run"):
        load_config(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="it is a folder"):
        load_config(folder)


def test_another_algorithm_replaces_the_preset_and_keeps_what_was_set_beside_it(folder: Path) -> None:
    config = load_config(folder)
    other = with_settings(config, ["algorithm.name=cispo"], "test")
    expected = load_config(TINY, ["algorithm.name=cispo", "algorithm.clip_low=0.15"])
    assert other.algorithm == expected.algorithm
    assert other.algorithm.surrogate != config.algorithm.surrogate
    assert with_settings(config, [], "test") == config


def test_setting_that_follows_from_the_command_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.name follows from the command here; leave it out"):
        with_settings(load_config(folder), ["run.name=a"], "test", run={"name": "b"})
