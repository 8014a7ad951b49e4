"""Runs with media: a long one with videos, one with all roles that read them, and a file that needs too much memory."""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.messages import Quarantined
from relax_actors.training.collector import KEEP_SECONDS, SWEEP_SECONDS
from tests.support.faults import is_over, story_of, wait_for_cell
from tests.support.media_rows import write_config
from tests.support.messages import assert_says
from tests.support.running import IMAGES, ON_POLICY, Run, wait_until
from tests.support.tiny_images import png, write_video

MakeRun = Callable[..., Run]
STEPS, EARLY, LATE = 200, range(45, 61), range(185, 201)
ACTORS = ("media.0", "rollout.0", "trainer.0")
SLACK = (8, 400)
"""MiB of memory and KiB of the store that are noise."""
SIDE = 20_000


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def huge_png() -> bytes:
    """Return a PNG of few bytes whose pixels need 1.2 GB."""
    rows = zlib.compress(bytes((SIDE // 8 + 1) * SIDE), 1)
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_image_beyond_the_memory_limit_is_quarantined_by_name_and_the_run_continues(
    make_run: MakeRun, tmp_path: Path
) -> None:
    names = [f"{index}.png" for index in range(30)]
    for index, name in enumerate(names):
        (tmp_path / name).write_bytes(huge_png() if index == 5 else png(index))
    rows = [{"prompt": "<image>7>", "images": [name]} for name in names]
    limits = ("media.memory_limit_mib=1000", f"media.limits.max_pixels={SIDE * SIDE}", "trainer.checkpoint_every=4")
    run = make_run("greedy", *limits, "run.steps=4", config=write_config(tmp_path, rows)).start()
    found: dict[str, Quarantined] = {}

    def seen() -> bool:
        cells = run.table.snapshot([run.table.subjects.column("quarantined")])
        found.update({str(at.row): run.table.read(cell.data, Quarantined) for at, cell in cells})
        return bool(found)

    wait_for_cell(run, "weights.0")
    wait_until(seen, "quarantined row", 120)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["trained"], result["quarantined"]) == (16, 1)
    (one,) = found.values()
    assert one.role == "media"
    assert_says(
        one.error, "RowError", f"{tmp_path}/rows.jsonl line 6", f"{tmp_path}/5.png", "memory", "raise the limit"
    )
    assert story_of(run).of("down") == []  # the decoder fails by itself, before the process must be killed


def resident(run: Run, actor: str) -> float:
    """Resident memory of an actor in MiB; 0 if it has ended."""
    pid = run.pid_of(actor)
    try:
        return 0 if pid is None else int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20
    except OSError:
        return 0


def store_of(run: Run) -> tuple[float, float]:
    """Size of the store in KiB without media that no step uses any more, and the age of the oldest of these."""
    sizes, oldest, now = dict[int, int](), 0.0, time.time()
    for head, _, names in os.walk(run.folder.root / "store"):  # ignores folders that are removed meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                status = (Path(head) / name).stat()
                if head.endswith("store/media") and status.st_nlink == 1:
                    oldest = max(oldest, now - status.st_ctime)
                else:
                    sizes[status.st_ino] = status.st_size
    return sum(sizes.values()) / 1024, oldest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_and_store_of_a_long_run_with_videos_stay_flat(make_run: MakeRun, tmp_path: Path) -> None:
    for index in range(4):
        write_video(tmp_path / f"{index}.mp4", frames=16 + index)
    # The part differs from row to row, so that each row has features of its own.
    rows = [
        {
            "prompt": "<video>7>",
            "videos": [{"path": f"{index % 4}.mp4", "start": index / 2000, "end": 1 + index / 2000}],
        }
        for index in range(4 * STEPS)
    ]
    settings = ("trainer.checkpoint_every=5", "rollout.group_size=2", f"run.steps={STEPS}")
    run = make_run("long", *settings, config=write_config(tmp_path, rows)).start()
    figures: dict[str, dict[range, list[float]]] = {}

    def over() -> bool:
        step = run.folder.last_checkpoint or 0
        for window in (EARLY, LATE):
            if step in window:
                values = {actor: resident(run, actor) for actor in ACTORS}
                values["store"], values["oldest"] = store_of(run)
                for name, value in values.items():
                    figures.setdefault(name, {EARLY: [], LATE: []})[window].append(value)
        return is_over(run)

    wait_until(over, "end of the run", 800)
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["trained"], result["quarantined"]) == (4 * STEPS, 0)
    peaks = {name: [max(found[window]) for window in (EARLY, LATE)] for name, found in figures.items()}
    for name in (*ACTORS, "store"):
        early, late = peaks[name]
        assert late <= 1.1 * early + SLACK[name == "store"], peaks
    assert peaks["oldest"][1] < KEEP_SECONDS + 2 * SWEEP_SECONDS, peaks


ROLES = (
    "roles.reference.replicas=1",
    "algorithm.kl.place=loss",
    "algorithm.kl.kind=k2",
    "algorithm.kl.coefficient=0.2",
    "roles.actor_fwd.replicas=1",
    "algorithm.proximal=actor_fwd",
    "algorithm.correction.kind=tis",
    "algorithm.name=ppo",
    "critic.learning_rate=1e-3",
    "algorithm.distil.place=loss",
)
SCORED = ("actor_fwd", "reference", "teacher")


def cells_of(run: Run, rows: list[str], columns: tuple[str, ...]) -> dict[str, Any]:
    """Wait for these columns of rows, and return their fields by subject."""
    cells: dict[str, Any] = {}
    wanted = [f"{row}.{column}" for row in rows for column in columns]

    def all_written() -> bool:
        for subject in wanted:
            if subject not in cells and (cell := run.table.get(subject)) is not None:
                cells[subject] = run.table.read_envelope(cell.data).fields
        return len(cells) == len(wanted) or is_over(run)

    wait_for_cell(run, "weights.0")
    wait_until(all_written, "all columns of step 0", 240)
    run.disconnect()
    assert sorted(cells) == sorted(wanted)
    return cells


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_episodes_read_the_media_of_their_prompt_and_a_teacher_with_a_hint_reads_them_too(make_run: MakeRun) -> None:
    """The branch of an episode shares the prompt's first token alone, so it reads no media."""
    settings = (
        "rollout.actor=tiny_episodes.Branches",
        "algorithm.aggregate=sample_mean_of_means",
        "roles.actor_fwd.replicas=1",
        "algorithm.proximal=actor_fwd",
        "algorithm.distil.place=loss",
        "roles.teacher.hint='7{prompt}'",
        "run.steps=2",
    )
    run = make_run("episodes", *ON_POLICY, *settings, config=IMAGES).start()
    rows = [f"relax.episodes.group.0.{index}" for index in range(4)]
    cells = cells_of(run, rows, ("media", "trajectory", "actor_fwd", "teacher"))
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["trained"], result["quarantined"]) == (8, 0)
    for row in rows:
        trajectory = cells[f"{row}.trajectory"]
        np.testing.assert_array_equal(trajectory["prompt_tokens"], cells[f"{row}.media"]["tokens"])
        assert 1 in trajectory["shared_lengths"]
        trained = trajectory["loss_mask"]
        sampled = trajectory["logprobs"][trained]
        np.testing.assert_allclose(cells[f"{row}.actor_fwd"]["value"][trained], sampled, atol=1e-5)
        hinted = cells[f"{row}.teacher"]["logprobs"][trained]
        assert np.isfinite(hinted).all()
        assert np.abs(hinted - sampled).max() > 1e-4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_teacher_reads_the_media_of_the_rows_that_it_writes(make_run: MakeRun) -> None:
    """It scores its own samples with the log-probs that it sampled them with."""
    first = make_run("first", *ON_POLICY, "run.steps=1", config=IMAGES)
    first.complete()
    distil = "algorithm.distil={place='loss', kind='forward_kl', top_k=4, student_share=0.0}"
    settings = (
        "algorithm.name=opd",
        distil,
        f"roles.teacher.model={first.folder.model}",
        "trainer.checkpoint_every=100",
    )
    run = make_run("taught", *ON_POLICY, *settings, "run.steps=2", config=IMAGES).start()
    rows = [f"relax.taught.group.0.{index}" for index in range(4)]
    cells = cells_of(run, rows, ("media", "trajectory", "teacher"))
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["trained"], result["quarantined"]) == (8, 0)
    assert sum(len(cells[f"{row}.media"]["media"]) for row in rows) >= 3
    for row in rows:
        np.testing.assert_allclose(
            cells[f"{row}.teacher"]["logprobs"], cells[f"{row}.trajectory"]["logprobs"], atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_role_that_scores_reads_the_media_of_its_row(make_run: MakeRun) -> None:
    """At step 0 all of them have the weights that sampled, so they find the same log-probs if they see the same."""
    shared = ("trainer.learning_rate=1e-12", "trainer.checkpoint_every=100", *ON_POLICY)
    first = make_run("first", *shared, "run.steps=1", config=IMAGES)
    first.complete()
    teacher = f"roles.teacher.model={first.folder.model}"
    run = make_run("all", *shared, *ROLES, teacher, "run.steps=3", config=IMAGES).start()
    rows = [f"relax.all.group.0.{index}" for index in range(4)]
    cells = cells_of(run, rows, ("media", "trajectory", "values", *SCORED))
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["trained"], result["quarantined"]) == (12, 0)
    assert sum(len(cells[f"{row}.media"]["media"]) for row in rows) >= 3
    for row in rows:
        sampled = cells[f"{row}.trajectory"]["logprobs"]
        for column in SCORED:
            scored = cells[f"{row}.{column}"]["logprobs" if column == "teacher" else "value"]
            np.testing.assert_allclose(scored, sampled, atol=1e-5)
        assert len(cells[f"{row}.values"]["value"]) == len(sampled)
