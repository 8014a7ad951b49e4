"""What keeps a run's folder small: old checkpoints, old logs."""

from __future__ import annotations

from pathlib import Path

from broker.store import Store
from relax_actors.runtime import durable_folder as checkpoint
from relax_actors.runtime import logs


def test_kept_checkpoints_and_those_of_later_incarnations_and_versions_stay(tmp_path: Path) -> None:
    """6.3 is of a later life too, but the published one is 6.2: nobody will load it."""
    for name in ("3.1", "3.2", "6.1", "6.2", "6.3", "9.1", "9.3", ".9.1.123.tmp", ".9.3.124.tmp", "notes"):
        (tmp_path / name).mkdir()
    checkpoint.remove_stale(tmp_path, {"6.2"}, version=6, incarnation=2)
    assert {path.name for path in tmp_path.iterdir()} == {"6.2", "9.1", "9.3", ".9.3.124.tmp", "notes"}


def test_log_above_its_limit_is_rotated_and_one_older_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trainer.0.log"
    logs.rotate(path)
    assert not path.exists()
    path.write_text("small")
    logs.rotate(path)
    assert path.read_text() == "small"
    for text in ("first", "second"):
        path.write_text(text.ljust(logs.LOG_BYTES + 1))
        logs.rotate(path)
        assert path.read_text() == ""
    assert (tmp_path / "trainer.0.log.1").read_text().startswith("second")
    assert len(list(tmp_path.iterdir())) == 2


def test_names_of_a_store_folder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.list_names("group") == []
    for name in ("12", "3"):
        (tmp_path / "group" / name).mkdir(parents=True)
    assert store.list_names("group") == ["12", "3"]
