"""Steps of runs of all layouts, algorithms and kinds of rows give the recorded bits when they are computed again."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator

import pytest

from relax_actors.replay.recording import opened
from relax_actors.replay.steps import Replayer
from tests.support.kept_layouts import LAYOUTS, STEPS
from tests.support.running import DEADLINE, Run, relax
from tests.support.tiny_megatron import skip_if_missing

PICKS = 5
"""Steps that are chosen in each run for each of its models: 60 in all."""
Finished = Callable[[str], Run]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """Return the finished run of a layout."""
    runs: dict[str, Run] = {}

    def finish(name: str) -> Run:
        if name.startswith("megatron"):
            skip_if_missing()
        if name not in runs:
            run = LAYOUTS[name].run(tmp_path_factory.mktemp("layout"))
            run.complete()
            runs[name] = run
        return runs[name]

    yield finish
    for run in runs.values():
        run.stop()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_steps_give_the_recorded_bits(finished: Finished, layout: str) -> None:
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"{layout}: steps chosen with seed {seed}\n")
    with opened(str(finished(layout).folder.root)) as recording:
        for model in LAYOUTS[layout].models:
            replayer = Replayer(recording, recording.config, model, gradients=True)
            try:
                for step in random.Random(seed).choices(range(STEPS), k=PICKS):
                    result = replayer.replay(step)
                    assert result.json()["difference"] is None, f"seed {seed}"
                    assert (result.recorded, result.steps[-1], len(result.figures) > 2) == (result.computed, step, True)
                    # Micro-batches of all ranks have a record, and those of a critic have none.
                    losses = [part["loss"].recorded is not None for part in result.micro_batches]
                    assert (all(losses), bool(losses)) == (True, model == "policy")
                    assert all({"gradient", "gradients"} <= part.keys() for part in result.json()["micro_batches"])
            finally:
                replayer.model.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", ["megatron, tensor parallel", "pairs"])
def test_branch_with_equal_settings_ends_with_the_same_weights(finished: Finished, layout: str) -> None:
    run = finished(layout)
    made = relax("branch", run.name, "again", "--at", "3", "--no-start", cwd=run.cwd, deadline=DEADLINE)
    assert made.returncode == 0, made.stderr
    folder = run.cwd / "runs" / "again"
    result = Run(run.cwd, "again", config=folder, at=folder).complete()
    first = json.loads(run.folder.summary.read_text())
    assert (result["weights_fingerprint"], result["steps"]) == (first["weights_fingerprint"], STEPS)
