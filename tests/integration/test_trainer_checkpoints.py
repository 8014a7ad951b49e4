"""Checkpoints and weight files of a trainer on a real server: pending, damaged, lost and kept ones."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.table import Table
from relax_actors.errors import ConfigError
from relax_actors.messages import Checkpoint, Weights
from tests.support.contexts import MakeTrainer
from tests.support.steps import ROWS, fingerprint, put_step, read_all


@pytest.mark.parametrize("file", ["optimizer.safetensors", "reference.safetensors"])
def test_checkpoint_with_a_flipped_bit_is_not_loaded(make_trainer: MakeTrainer, table: Table, file: str) -> None:
    settings = ("trainer.checkpoint_every=1", "algorithm.kl.place=loss", "algorithm.kl.coefficient=0.1")
    trainer = make_trainer(*settings)
    put_step(table, 0, version=0)
    read_all(table, trainer)
    checkpoint = table.fetch_last("checkpoint", Checkpoint)
    assert checkpoint is not None
    path = trainer.context.folder.root / checkpoint.path / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"file {file} of .* is not what was written there"):
        make_trainer(*settings, incarnation=2)


def checkpoints(table: Table) -> list[int]:
    return [cell_id.step for cell_id, _ in table.snapshot([table.subjects.numbered("checkpoint", "*")])]


ASYNC_CHECKPOINTS = ("trainer.checkpoint_every=1", "trainer.async_checkpoints=true", "staleness.max=0")


def test_pending_checkpoint_is_published_after_the_next_step(make_trainer: MakeTrainer, table: Table) -> None:
    trainer = make_trainer(*ASYNC_CHECKPOINTS)
    put_step(table, 0, version=0)
    read_all(table, trainer)
    assert (trainer.version, checkpoints(table)) == (1, [0])
    # An incarnation that ends here leaves an unpublished folder: the next resumes from the previous checkpoint.
    other = make_trainer(*ASYNC_CHECKPOINTS, incarnation=2)
    assert other.version == 1
    put_step(table, 1, version=1)
    read_all(table, other)
    assert (other.version, checkpoints(table)) == (2, [0, 1])
    put_step(table, 2, version=2)
    read_all(table, other)
    assert checkpoints(table) == [0, 1, 2]
    found = table.fetch_last("checkpoint", Checkpoint)
    assert found is not None
    assert found.fingerprint == fingerprint(table, 2)
    third = make_trainer(*ASYNC_CHECKPOINTS, incarnation=3)
    assert third.engine.fingerprint() == fingerprint(table, 3)
    folder = third.context.folder.checkpoints
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == ["1.2", "2.2"]


def test_full_disk_gives_up_a_pending_checkpoint_and_the_next_is_written_synchronously(
    make_trainer: MakeTrainer, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(*ASYNC_CHECKPOINTS)

    def begin_save(folder: Path) -> Callable[[], None]:
        (folder / "half").write_bytes(b"half")

        def finish() -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        return finish

    monkeypatch.setattr(trainer.engine, "begin_save", begin_save)
    for step in range(2):
        put_step(table, step, version=step)
        read_all(table, trainer)
    assert (trainer.version, checkpoints(table)) == (2, [0, 2])
    assert [path.name for path in trainer.context.folder.checkpoints.iterdir() if "1." in path.name[:3]] == []


def test_weight_file_lost_right_after_its_write_is_rewritten(
    make_trainer: MakeTrainer, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    store = trainer.context.table.store
    write = store.write_together

    def vanishing(uris: Sequence[str], save: Callable[..., Any]) -> Any:
        result = write(uris, save)
        for uri in uris:
            if uri.startswith("weights/1."):
                store.path(uri).unlink()
        return result

    monkeypatch.setattr(store, "write_together", vanishing)
    put_step(table, 0, version=0)
    read_all(table, trainer)
    published = table.fetch(table.subjects.numbered("weights", 1), Weights)
    assert published is not None
    (shard,) = published.shards
    path = table.store.path(shard.path)
    assert not path.exists()
    trainer.idle()
    assert not path.exists()
    monkeypatch.undo()
    trainer.idle()
    assert path.stat().st_size >= shard.nbytes > 0


def test_kept_steps_have_their_rows_and_a_checkpoint_at_or_before_the_first(
    make_trainer: MakeTrainer, table: Table
) -> None:
    trainer = make_trainer("run.keep_steps=3", "trainer.checkpoint_every=2", "run.steps=9")
    for step in range(7):
        put_step(table, step, version=step)
        read_all(table, trainer)
    folder = trainer.context.folder.checkpoints
    assert sorted(path.name for path in folder.iterdir()) == ["2.1", "4.1", "6.1"]
    trainer.close()  # sweeps the table a last time
    newest = table.fetch_last("checkpoint", Checkpoint)
    assert newest is not None
    assert (newest.version, newest.floor) == (6, 2)
    kept = {step: table.count_cells(f"{table.subjects.prefix}.group.{step}.*.trajectory") for step in range(7)}
    assert kept == {0: 0, 1: 0, **dict.fromkeys(range(2, 7), ROWS)}
