"""The run's folder: what an earlier version wrote is refused with the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_actors.config import load_config
from relax_actors.errors import ConfigError
from relax_actors.runtime.run_folder import RunFolder
from tests.support.messages import assert_says
from tests.support.running import TINY


def test_folder_of_an_earlier_schema_is_refused(tmp_path: Path) -> None:
    folder, config = RunFolder(tmp_path), load_config(TINY)
    folder.save_config(config, "")
    assert folder.load_config() == config
    body = json.loads(folder.config.read_text())
    folder.config.write_text(json.dumps({name: value for name, value in body.items() if name != "schema"}))
    with pytest.raises(ConfigError) as caught:
        folder.load_config()
    assert_says(caught.value, tmp_path, "schema 1", "schema 3", "run.name")


def test_damaged_configuration_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text('{"schema"')
    with pytest.raises(ConfigError) as caught:
        folder.load_config()
    assert_says(caught.value, folder.config, "line 1 column 10", "restore it", "run.name")
