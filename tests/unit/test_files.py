"""Atomic writes of small files, and cleanup after dead writers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from broker.address import Address
from broker.files import remove_unfinished, write_private
from relax_actors.runtime.logs import BestEffortFile


def test_write_private_replaces_the_file_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "broker.json"
    write_private(path, "old and long")
    write_private(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_write_private_does_not_follow_a_planted_link(tmp_path: Path) -> None:
    path, victim = tmp_path / "broker.json", tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".{path.name}.{os.getpid()}.tmp").symlink_to(victim)
    write_private(path, "secret")
    assert (path.read_text(), victim.read_text()) == ("secret", "mine")
    assert not path.is_symlink()


def test_only_temporary_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    kept = tmp_path / f".config.json.{os.getpid()}.tmp"
    for path in (kept, tmp_path / f".broker.json.{gone.pid}.tmp", tmp_path / "config.json"):
        path.touch()
    remove_unfinished(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([kept.name, "config.json"])


def test_the_folder_of_a_dead_writer_is_left_to_its_successor(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".model.{dead.pid}.tmp"
    left.mkdir()
    remove_unfinished(tmp_path)
    assert left.is_dir()


def test_closed_log_raises_no_error(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        log = BestEffortFile(file)
        assert log.write("one\n") == 4
    assert log.write("two\n") == 0
    log.flush()
    assert (tmp_path / "log").read_text() == "one\n"


def test_address_in_a_moved_folder_finds_the_credentials_below_it(tmp_path: Path) -> None:
    run, keys = tmp_path / "run", "broker/keys/observer/nats.creds"
    (run / keys).parent.mkdir(parents=True)
    (run / keys).touch()
    Address("nats://127.0.0.1:1", credentials=str(run / "broker" / "keys")).save(run / "broker.json")
    moved = run.rename(tmp_path / "moved")
    assert Address.load(moved / "broker.json").for_user("observer").credentials == str(moved / keys)
    elsewhere = Address("nats://127.0.0.1:1", credentials="/keys")
    elsewhere.save(moved / "broker.json")
    assert Address.load(moved / "broker.json") == elsewhere
