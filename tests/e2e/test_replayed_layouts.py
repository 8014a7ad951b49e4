"""Steps of runs of all layouts, algorithms and kinds of rows give the recorded bits when they are computed again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from relax_actors.replay.recording import Recording, opened
from relax_actors.replay.steps import Replayer
from tests.support.kept_layouts import LAYOUTS, STEPS
from tests.support.running import Run
from tests.support.tiny_megatron import skip_if_missing

PICKS = 5
"""Steps that are chosen in each run and for each of its models."""


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Recording]]:
    """Return the record of a finished run of a layout."""
    with ExitStack() as stack:

        def record(name: str) -> Recording:
            run: Run = LAYOUTS[name].run(tmp_path_factory.mktemp("layout"))
            run.complete()
            return stack.enter_context(opened(str(run.folder.root)))

        yield record


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_steps_give_the_recorded_bits(recorded: Callable[[str], Recording], layout: str) -> None:
    if layout.startswith("megatron"):
        skip_if_missing()
    recording = recorded(layout)
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"{layout}: steps chosen with seed {seed}\n")
    for model in LAYOUTS[layout].models:
        replayer = Replayer(recording, recording.config, model)
        try:
            for step in random.Random(seed).choices(range(STEPS), k=PICKS):
                result = replayer.replay(step)
                assert result.json()["difference"] is None, f"seed {seed}"
                assert (result.recorded, result.steps[-1], len(result.figures) > 2) == (result.computed, step, True)
        finally:
            replayer.model.close()
