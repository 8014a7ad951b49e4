"""`relax samples` shows what the model said, read from a real broker with the credentials of an observer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.codec import encode
from broker.connection import Connection
from broker.permissions import OPERATOR
from broker.store import Store
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.messages import Checkpoint, MediaSource, Prompt, Reward, Sample, TokenSequence, Trajectory
from relax_actors.messages.samples import FinishReason
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.guarded import MakeGuarded
from tests.support.hostile_text import ATTACKS
from tests.support.messages import assert_says
from tests.support.running import TINY, Run, relax, wait_until

RUN = "said"
SUBJECTS = Subjects(RUN)
HOSTILE = "".join(text for text in ATTACKS if "half" not in text)  # a lone surrogate is in no cell


class Spoken:
    """A run on a keyed server, without processes, whose cells the test writes."""

    def __init__(self, make_guarded: MakeGuarded, folder: Path) -> None:
        self.guarded = make_guarded([f"run.name={RUN}"])
        self.guarded.make()
        self.guarded.start()
        self.folder = folder
        self.connection = Connection(self.guarded.address(OPERATOR), "test")
        config = load_config(TINY, [f"run.name={RUN}", f"run.folder={folder / RUN}"])
        self.connection.call(ensure_run_streams(self.connection, config), 60)
        self.table = Table(self.connection, SUBJECTS, Store(folder / "store"), "test.0#1")

    def say(self, row: RowId, texts: list[str], rewards: list[float] | None = None, **prompt: Any) -> None:
        """Write the prompt, the samples and the rewards of a row."""
        fields = {"text": "3+4=", "tokens": np.arange(4, dtype=np.int32), "answer": "7", "metadata": {}} | prompt
        self.table.put(SUBJECTS.cell(row, "prompt"), Prompt(**fields, seed=1, min_version=row.step))
        tokens, version = np.arange(6, dtype=np.int32), max(row.step - 1, 0)
        mask = np.array([False] * 4 + [True] * 2)
        versions = np.where(mask, version, -1).astype(np.int32)
        sequence = TokenSequence(tokens, mask, np.zeros(6, np.float32), versions)
        samples = [Sample((sequence,), text, FinishReason.STOP) for text in texts]
        self.table.put(SUBJECTS.cell(row, "trajectory"), Trajectory.of(tokens[:4], samples))
        if rewards is not None:
            self.table.put(SUBJECTS.cell(row, "reward"), Reward(np.array(rewards, np.float32)))

    def shown(self, *arguments: str, code: int = 0) -> str:
        """Output of `relax samples` on a machine without the run's folder."""
        access = ["--broker", self.guarded.url, "--credentials", str(self.guarded.keys)]
        done: subprocess.CompletedProcess[str] = relax("samples", RUN, *arguments, *access, cwd=self.folder)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr


@pytest.fixture
def spoken(make_guarded: MakeGuarded, tmp_path: Path) -> Iterator[Spoken]:
    found = Spoken(make_guarded, tmp_path)
    with closing(found.connection):
        yield found


@pytest.mark.slow
def test_rows_are_shown_by_step_and_number(spoken: Spoken) -> None:
    for step in range(6):
        spoken.say(RowId(step, 0), [f"seven at {step}", "8"], [1.0, 0.25])
    spoken.say(RowId(2, 0, "eval"), ["held"], [0.5])
    whole = spoken.shown()
    assert [line.split(":")[0] for line in whole.splitlines() if not line.startswith(" ")] == [
        "group.3.0",
        "group.4.0",
        "group.5.0",
        "eval.2.0",
    ]
    (row,) = spoken.shown("--step", "4").split("group.4.0")[1:]
    for words in (
        "sampled by version 3",
        "prompt: 3+4=",
        "expected answer: 7",
        "seven at 4",
        "reward 0.25, 2 tokens, stop",
    ):
        assert words in row, row
    assert "held-out" in spoken.shown("--step", "2")
    assert spoken.shown("--last", "1").startswith("eval.2.0: held-out, step 2, sampled by version 1")


def test_json_has_one_line_a_row(spoken: Spoken) -> None:
    spoken.say(RowId(0, 1), ["a\nb", "c"])
    (row,) = map(json.loads, spoken.shown("--json", "--step", "0").splitlines())
    assert (row["row"], row["prompt"], row["answer"], row["versions"]) == ("group.0.1", "3+4=", "7", [0, 0])
    assert [(one["text"], one["reward"], one["tokens"]) for one in row["samples"]] == [
        ("a\nb", None, 2),
        ("c", None, 2),
    ]


def test_media_and_messages_are_shown_as_what_they_are(spoken: Spoken) -> None:
    ask = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}
    media = [MediaSource("image", "pictures/cat.png", xxh3_128="0" * 32, size=300)]
    spoken.say(RowId(0, 0), ["a cat"], [1.0], messages=[ask], media=media)
    shown = spoken.shown()
    assert "prompt, user: [image]what is it?" in shown
    assert "medium: image, 300 bytes, pictures/cat.png" in shown


def test_text_of_the_model_cannot_steer_the_terminal(spoken: Spoken) -> None:
    spoken.say(RowId(0, 0), [HOSTILE, "x\ngroup.9.9: step 9"], [0.0, 0.0], text=HOSTILE, answer=HOSTILE)
    for arguments in ((), ("--json",)):
        shown = spoken.shown(*arguments)
        assert all(line.isprintable() for line in shown.splitlines())
        assert [line for line in shown.splitlines() if line.startswith("group.9.9")] == []


def test_malformed_cells_are_left_out(spoken: Spoken) -> None:
    spoken.say(RowId(0, 0), ["good"], [1.0])
    counts = np.array([7, -3], np.int32)
    odd: dict[str, Any] = {
        "texts": ["odd"],
        "versions": "x",
        "lengths": {},
        "finish_reasons": 3,
        "values": ["x"],
        "messages": [1, {"role": "user", "content": "x", "tool_calls": 5}],
    }
    split: dict[str, Any] = {
        "texts": ["split"],
        "lengths": counts,
        "sequence_counts": counts,
        "conversations": counts,
        "media": [1],
    }
    split["values"] = np.array([np.nan])
    malformed: list[dict[str, Any]] = [{}, {"texts": 3}, odd, split]
    for index, fields in enumerate(malformed, 1):
        cell = make_dataclass("Trajectory", fields)(**fields)
        subjects = [SUBJECTS.cell(RowId(0, index), name) for name in ("prompt", "trajectory", "reward")]
        spoken.table.put_encoded([(subject, encode(cell, "rollout.0#1")) for subject in subjects])
    spoken.table.put_encoded([(SUBJECTS.cell(RowId(0, 9), "trajectory"), b"no cell")])
    shown = spoken.shown("--step", "0")
    assert [line.split(":")[0] for line in shown.splitlines() if line.startswith("group")] == [
        "group.0.0",
        "group.0.3",
        "group.0.4",
    ]
    assert "sample 0: not scored yet" in shown


def test_collected_rows_and_rows_to_come_are_told_apart(spoken: Spoken) -> None:
    assert "no samples now" in spoken.shown(code=1)
    spoken.say(RowId(7, 0), ["late"], [1.0])
    spoken.table.put(SUBJECTS.numbered("checkpoint", 6), Checkpoint(6, "x", "f" * 32, 5))
    collected = spoken.shown("--step", "3", code=1)
    assert_says(collected, "step 3", "collected already", "step 5", "trainer.checkpoint_every")
    later = spoken.shown("--step", "9", code=1)
    assert_says(later, "step 9", "has samples yet", "step 7")


DATA = ("eval.data.kind=python", "eval.data.size=4", "eval.data.function=tiny_tasks.make")


@pytest.mark.slow
def test_samples_of_a_live_run_and_of_a_stopped_one(make_run: Callable[..., Run], tmp_path: Path) -> None:
    endless = ("run.steps=1000000", "trainer.checkpoint_every=1000000")  # no row is collected
    run = make_run("speaks", *endless, "eval.rows=2", "eval.every=4", *DATA).start()
    wait_until(lambda: run.table.get("relax.speaks.batch.2"), "batch.2")
    (row, *_) = map(json.loads, relax("samples", "speaks", "--step", "1", "--json", cwd=tmp_path).stdout.splitlines())
    assert row["row"].startswith("group.1.")
    assert len(row["samples"]) == 4
    assert all(sample["reward"] is not None and sample["tokens"] for sample in row["samples"])
    run.end_in_order()
    done = relax("samples", "speaks", cwd=tmp_path)
    assert done.returncode == 0 or "collected" in done.stderr, done.stdout + done.stderr
