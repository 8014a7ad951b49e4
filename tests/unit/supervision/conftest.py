"""Fixture for process trees."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_actors.supervision.launch import Launch
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.spec import Backoff, ChildSpec, Limits
from relax_actors.supervision.supervisor import Supervisor
from tests.support.process_trees import (
    Recorder,
    RunTree,
    TreeThread,
    python,
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunTree]:
    """Runs a tree of children, given as name -> script; checks at the end that no process is left."""
    made: list[TreeThread] = []

    def start(
        scripts: dict[str, str],
        *,
        intensity: int = 5,
        heartbeat: float = 60.0,
        boxes: tuple[str, ...] = (),
        pools: list[tuple[str, ...]] | None = None,
        **spec: Any,
    ) -> TreeThread:
        def launch(child: str) -> Launch:
            box = tmp_path / f"{child}.box" if child in boxes else None
            return Launch(python(scripts[child]), tmp_path / "logs" / child, box, {"CHILD": child})

        groups = pools or [tuple(scripts)]
        supervisors = {
            group[0]: Supervisor(
                [ChildSpec(child, **spec) for child in group],
                Limits(intensity, 60.0),
                Backoff(0.01, 0.05),
                random.Random(1),
            )
            for group in groups
        }
        recorder = Recorder()
        made.append(TreeThread(ProcessTree(supervisors, launch, recorder, heartbeat), recorder))
        return made[-1]

    yield start
    for running in made:
        running.stop()
        assert [pid for pid in running.pids if Path(f"/proc/{pid}").exists()] == []
