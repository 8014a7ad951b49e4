"""Durable folders: published complete or not at all, verified, and removed when stale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.errors import StoreError
from relax_actors.runtime.durable_folder import remove_stale, seal, verify, write


def fill(text: str) -> object:
    def save(folder: Path) -> None:
        (folder / "weights").write_text(text)

    return save


def test_older_folder_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    write(tmp_path / "model", fill("old"))
    write(tmp_path / "model", fill("new"))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights").read_text() == "new"


def test_failed_save_leaves_the_older_folder_unchanged(tmp_path: Path) -> None:
    write(tmp_path / "model", fill("old"))

    def fail(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        write(tmp_path / "model", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights").read_text() == "old"


def test_leftovers_of_dead_writers_are_removed_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f".model.{gone.pid}.tmp").mkdir()
    living = tmp_path / f".model.{os.getppid()}.tmp"
    living.mkdir()
    write(tmp_path / "model", fill("new"))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([living.name, "model"])


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("3.1", False),  # no longer wanted
        ("6.1", False),  # whole, but its writer died before it could publish it
        ("6.2", True),
        ("4.2", True),
        ("8.3", True),  # of a life after this one
        (".6.1.77.tmp", False),
        (".8.3.77.tmp", True),
        ("6.1.mine", True),
        ("notes", True),
    ],
)
def test_only_checkpoints_that_will_not_be_loaded_are_removed(tmp_path: Path, name: str, *, stays: bool) -> None:
    (tmp_path / name).mkdir()
    remove_stale(tmp_path, ["4.2", "6.2"], 6, 2)
    assert (tmp_path / name).exists() is stays


def test_damaged_file_is_named(tmp_path: Path) -> None:
    def save(folder: Path) -> None:
        (folder / "shards").mkdir()
        (folder / "shards" / "a").write_bytes(bytes(1000))
        (folder / "b").write_text("b")
        seal(folder)

    folder = tmp_path / "7.1"
    write(folder, save)
    verify(folder)
    (folder / "more").touch()
    with pytest.raises(StoreError, match=f"file more of {folder} is not what was written"):
        verify(folder)
    (folder / "more").unlink()
    (folder / "b").unlink()
    with pytest.raises(StoreError, match="file b of"):
        verify(folder)
    (folder / "b").write_text("b")
    data = bytearray(1000)
    data[500] = 1
    (folder / "shards" / "a").write_bytes(data)
    with pytest.raises(StoreError, match="file shards/a of"):
        verify(folder)
