"""Removal of a run: its files in a store of its own, and settings that cannot be read."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from relax_actors.errors import ConfigError
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.discard import discard, discard_all, finish_discarding
from relax_actors.supervision.sandbox import SandboxFiles
from relax_actors.supervision.streams import MARK

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


def test_the_files_of_a_run_in_a_store_of_its_own_are_removed(tmp_path: Path) -> None:
    folder, store = RunFolder(tmp_path / "run"), tmp_path / "store"
    for name in ("group/3", "eval/2", "media", "weights", "code", "notes"):
        (store / name).mkdir(parents=True)
        (store / name / "file").touch()
    (store / MARK).touch()
    folder.root.mkdir()
    saved = {"run": {"name": "tiny"}, "broker": {"url": None}, "store": {"path": str(store)}}
    folder.config.write_text(json.dumps({"config": saved}))
    discard(folder)
    assert [path.name for path in store.iterdir()] == ["notes"]


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


def three_runs(at: Path) -> list[RunFolder]:
    saved = {"run": {"name": "tiny"}, "broker": {"url": None}, "store": {"path": None}}
    folders = [RunFolder(at / name) for name in ("first", "second", "third")]
    for folder in folders:
        folder.model.mkdir(parents=True)
        folder.config.write_text(json.dumps({"config": saved}))
    return folders


def test_all_runs_of_a_sequence_are_removed(tmp_path: Path) -> None:
    folders = three_runs(tmp_path)
    # A removal that was interrupted before, and a stage that was never begun.
    folders[2].config.rename(folders[2].discarded)
    discard_all([*folders, RunFolder(tmp_path / "fourth")])
    left = {path.name for path in tmp_path.rglob("*")}
    assert left <= {"first", "second", "third", "lock"}


@pytest.mark.parametrize("fault", ["up", "unreadable", "unreadable removal"])
def test_no_run_of_a_sequence_is_removed_if_one_cannot_be(tmp_path: Path, fault: str) -> None:
    folders = three_runs(tmp_path)
    with ExitStack() as stack:
        if fault == "up":
            stack.enter_context(folders[1].lock())
        else:
            name = "discarded.json" if "removal" in fault else "config.json"
            (folders[0].root / name).write_text("{")
        with pytest.raises(ConfigError):
            discard_all(folders)
    assert all(folder.model.is_dir() and folder.config.exists() for folder in folders)
