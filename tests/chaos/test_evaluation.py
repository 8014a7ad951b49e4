"""Evaluations whose processes are killed end with the figures of a calm one, and count every prompt once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from broker.store import Store
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.evaluation.records import read_evaluation
from relax_actors.runtime.run_folder import RunFolder
from tests.support.running import SUPPORT, Run, processes_of, wait_until

CONFIG = SUPPORT / "tiny_eval.toml"
ROWS = 48


class Evaluation(Run):
    """A `relax eval` under a name of its own; start it again to resume."""

    @property
    def folder(self) -> RunFolder:
        """The folder below `runs`, which is named after the run and a digest."""
        (found,) = wait_until(lambda: list((self.cwd / "runs").glob(f"{self.name}-eval-*")), "folder")
        return RunFolder(found)

    @property
    def table(self) -> Table:
        return Table(self.connection, Subjects(self.folder.root.name), Store(self.folder.root / "store"), "test")

    def start(self, *more: str) -> Evaluation:
        command = [sys.executable, "-m", "relax_actors.cli.main", "eval", "initial", str(self.config)]
        command += [f"run.name={self.name}", *self.settings, *more, "--json", "--quiet", "--samples", "0"]
        self.process = subprocess.Popen(
            command, cwd=self.cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        return self

    def has_scored(self, index: int) -> bool:
        """Whether a row has a reward."""
        return self.table.get(f"relax.{self.folder.root.name}.eval.0.{index}.reward") is not None


@pytest.fixture
def make_evaluation(tmp_path: Path) -> Any:
    made: list[Evaluation] = []

    def make(name: str) -> Evaluation:
        made.append(Evaluation(tmp_path, name, config=CONFIG))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.mark.slow
def test_killed_evaluation_ends_with_the_figures_of_a_calm_one(make_evaluation: Callable[[str], Evaluation]) -> None:
    calm = make_evaluation("calm")
    expected = calm.complete()["sets"]
    assert {name: figures["rows"] for name, figures in expected.items()} == {"greedy": 12, "drawn": 36}

    killed = make_evaluation("killed")
    killed.start()
    for actor, rows in (("rollout.0", 4), ("reward.0", 10), ("evaluator.0", 16), ("trainer.0", 20)):
        wait_until(partial(killed.has_scored, rows), f"reward of row {rows}", 120)
        killed.kill(actor)
    killed.kill("reward.0", signal.SIGSTOP)  # so that the evaluation does not end before its command
    killed.disconnect()
    assert killed.process is not None
    killed.process.send_signal(signal.SIGKILL)
    killed.process.communicate(timeout=30)
    wait_until(lambda: processes_of(killed.folder.root) == [], "end of all actors", 60)
    assert not killed.folder.evaluation(0).exists()

    result = killed.complete()
    assert result["sets"] == expected
    records = read_evaluation(killed.folder.evaluation(0)).records
    assert [record.row for record in records] == [f"eval.0.{index}" for index in range(ROWS)]
    assert all(len(record.answers) == (1 if record.set == "greedy" else 4) for record in records)
    assert [(r.prompt, r.answers) for r in records] == [
        (r.prompt, r.answers) for r in read_evaluation(calm.folder.evaluation(0)).records
    ]
    # It is finished, and the command shows the same figures without starting anything.
    again = killed.complete()
    assert again == result
    assert json.loads(killed.folder.summary.read_text())["steps"] == 0
