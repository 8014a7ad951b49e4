"""Removal of a run whose saved settings cannot be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relax_actors.errors import ConfigError
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.discard import discard, finish_discarding
from relax_actors.supervision.sandbox import SandboxFiles

WITHOUT_STORE = '{"config": {"run": {"name": "tiny"}, "broker": {"url": null}}}'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"config', "JSONDecodeError: Unterminated string starting at: line 1 column 2 (char 1)"),
        ("[]", "TypeError: list indices must be integers or slices, not str"),
        ('{"config": {}}', "KeyError: 'run'"),
        (WITHOUT_STORE, "KeyError: 'store'"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "discarded.json"])
def test_run_with_unreadable_settings_is_not_removed(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "model").mkdir()
    message = (
        f"{tmp_path / name} cannot be read ({why}), so the run's broker and store are unknown; remove the folder "
        f"{tmp_path} yourself, or set another run.name"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        discard(RunFolder(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "model"])


def test_views_of_sandboxes_are_removed_with_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    view = SandboxFiles(folder, "reward", 0).view
    view.mkdir(parents=True)
    (view / "broker.json").write_text("{}")
    folder.discarded.write_text(
        '{"config": {"run": {"name": "tiny"}, "broker": {"url": null}, "store": {"path": null}}}'
    )
    finish_discarding(folder)
    assert list(tmp_path.iterdir()) == []
