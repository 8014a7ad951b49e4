"""Full disks and damaged files: reported by name, waited for or repaired, and no tensor is ever wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import story_of
from tests.support.running import Run, relax, wait_until

MakeRun = Callable[..., Run]
SLOW = "reward.function=tiny_tasks.slow_share_of_sevens"
# Samples so long that the arrays of a row are in a segment, not in the cell.
WIDE = (
    "rollout.group_size=96",
    "rollout.max_tokens=48",
    "trainer.prompts_per_step=2",
    SLOW,
)


def fill(folder: Path) -> Path:
    """Fill the file system with one file."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    return path


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind, of a live run or after its end."""
    return story_of(run).of(kind)


@pytest.mark.slow
def test_run_continues_once_a_full_disk_has_room(make_run: MakeRun, small_disk: Path) -> None:
    """Segments, checkpoints, weights and the broker's store are on the disk."""
    run = make_run("full", "run.steps=60", f"run.folder={small_disk}/run", SLOW)
    run.at = small_disk / "run"
    run.start()
    wait_until(lambda: run.table.get("relax.full.batch.5"), "batch.5", 90)
    done = relax("chaos", str(run.at), "--disk-full", "4", "--every", "0.1", cwd=run.cwd)
    assert "1 of 1 faults done" in done.stdout, done.stderr
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["admitted"], result["trained"], result["in_flight"]) == (240, 240, 0)
    log = run.folder.log("root").read_text()
    assert "the broker cannot write" in log
    assert "0 MiB free" in log


@pytest.mark.slow
def test_chaos_refuses_to_fill_a_shared_disk(make_run: MakeRun) -> None:
    run = make_run("shared", "run.steps=1000").start()
    wait_until(lambda: run.table.get("relax.shared.batch.0"), "batch.0", 90)
    refused = relax("chaos", "shared", "--disk-full", "4", "--every", "0", cwd=run.cwd)
    assert refused.returncode == 2
    assert "which other programs use" in refused.stderr


@pytest.mark.slow
def test_run_ends_with_a_report_while_the_disk_is_full_and_resumes_with_room(
    make_run: MakeRun, small_disk: Path
) -> None:
    settings = (f"store.path={small_disk}/store", "store.patience=2", "supervision.intensity=1", "run.steps=40")
    run = make_run("fulldisk", *settings).start()
    wait_until(lambda: run.table.get("relax.fulldisk.batch.2"), "batch.2", 90)
    filler = fill(small_disk)
    run.disconnect()
    code, _, said = run.finish(90)
    assert code == 1
    assert "MiB free, too little for segment weights/" in said
    assert events(run, "waiting_for_room")
    filler.unlink()
    code, result, said = run.start().finish()
    assert code == 0, said
    assert result["trained"] == 40 * 4


@pytest.mark.slow
def test_run_ends_with_a_report_while_the_disk_of_the_broker_is_full(make_run: MakeRun, small_disk: Path) -> None:
    run = make_run("fullbroker", "store.patience=2", f"run.folder={small_disk}/run", "run.steps=40")
    run.at = small_disk / "run"
    run.start()
    wait_until(lambda: run.table.get("relax.fullbroker.batch.2"), "batch.2", 90)
    filler = fill(small_disk)
    run.disconnect()
    code, _, said = run.finish(90)
    assert code == 1
    assert "free space" in said
    filler.unlink()
    code, result, said = run.start().finish()
    assert code == 0, said
    assert result["trained"] == 40 * 4


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damaged_segments_are_reported_and_their_rows_replaced(make_run: MakeRun, damage: str) -> None:
    run = make_run("damaged", *WIDE, "run.steps=3000", "staleness.max=2", "trainer.checkpoint_every=1000").start()
    wait_until(lambda: run.table.get("relax.damaged.batch.0"), "batch.0", 90)
    options = ("--corrupt-segment", damage, "--every", "0.1", "--count", "60")
    lost: list[dict[str, Any]] = []

    def hurt() -> bool:
        done = relax("chaos", "damaged", *options, cwd=run.cwd)
        assert "60 of 60 faults done" in done.stdout, done.stdout + done.stderr
        lost.extend(e for e in events(run, "row_dropped") if e["reason"] == "lost_segment")
        return bool(lost)

    wait_until(hurt, "row that was lost", 150)
    assert all(
        "corrupt" in str(e["detail"]) or "missing" in str(e["detail"]) or "few" in str(e["detail"]) for e in lost
    )
    assert events(run, "crashed") == []
    assert not run.table.list_subjects("relax.damaged.group.*.*.quarantined")
    for row in {str(e["row"]) for e in lost}:
        _, step, index = row.split(".")
        wait_until(
            lambda step=step, index=index: run.table.get(f"relax.damaged.group.{step}.{int(index) + 2}.prompt"),
            f"successor of {row}",
        )
    run.end_in_order()


@pytest.mark.slow
def test_damaged_weights_in_use_are_rewritten(make_run: MakeRun) -> None:
    run = make_run("lostweights", "staleness.max=0", SLOW, "run.steps=12").start()
    folder = run.folder.root / "store" / "weights"
    wait_until(lambda: run.table.get("relax.lostweights.batch.1"), "batch.1", 90)
    run.kill("rollout.0", signal.SIGSTOP)
    wait_until(lambda: run.table.get("relax.lostweights.weights.2"), "weights.2")
    newest = max(folder.glob("*.safetensors"), key=lambda path: int(path.name.split(".")[0]))
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    run.kill("rollout.0", signal.SIGCONT)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["trained"] == 48
    assert [e["version"] for e in events(run, "weights_corrupt")] == [int(newest.name.split(".")[0])]
    assert events(run, "weights_rewritten")


@pytest.mark.slow
def test_damaged_checkpoint_ends_the_run_and_is_named(make_run: MakeRun) -> None:
    run = make_run("badcheckpoint", "trainer.checkpoint_every=2", "run.steps=1000").start()
    wait_until(lambda: run.table.get("relax.badcheckpoint.checkpoint.4"), "checkpoint.4", 90)
    run.disconnect()
    assert run.process is not None
    run.process.terminate()
    assert run.finish(60)[0] == 0
    last = max(run.folder.checkpoints.iterdir(), key=lambda path: int(path.name.split(".")[0]))
    file = next(last.glob("optimizer*"))
    os.truncate(file, file.stat().st_size // 2)
    code, _, said = run.start().finish(90)
    assert code == 1
    assert f"checkpoint {last} cannot be read" in said
