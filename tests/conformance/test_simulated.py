"""The simulated engines keep the protocols of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relax_actors.config import Config
from relax_actors.simulation.backends import SimulatedTraining
from relax_actors.simulation.devices import Devices
from relax_actors.simulation.durations import draw, random_generator
from relax_actors.simulation.inference import SimulatedInference
from tests.conformance.base.inference_engine import InferenceEngineConformance, RowsJoin, SamplesFollowSeeds
from tests.conformance.base.training_engine import MakeEngine, TrainingEngineConformance
from tests.support.simulated import Clock, simulated_devices

SAMPLES = 4


@pytest.fixture
def run(tmp_path: Path) -> tuple[Config, Devices]:
    return simulated_devices(tmp_path)


class TestSimulatedInference(InferenceEngineConformance, RowsJoin, SamplesFollowSeeds):
    implements = "simulated"

    @pytest.fixture(autouse=True)
    def rows(self, run: tuple[Config, Devices], monkeypatch: pytest.MonkeyPatch) -> None:
        """Requests whose drawn lengths are far apart, and a clock that passes by sleeping alone."""
        monkeypatch.setattr("relax_actors.simulation.inference.time", Clock())
        lengths = run[1].simulate.generation.tokens
        longest = {seed: draw(lengths, random_generator(seed), SAMPLES).max() for seed in range(40)}
        by_length = sorted(longest, key=lambda seed: longest[seed])
        request = InferenceEngineConformance.long
        self.short, self.long = (replace(request, seed=by_length[i], samples=SAMPLES) for i in (0, -1))

    @pytest.fixture
    def engine(self, run: tuple[Config, Devices]) -> Iterator[SimulatedInference]:
        engine = SimulatedInference(run[1], 0, 64, rows=3)
        yield engine
        engine.close()
        assert run[1].running.sum() == 0

    @pytest.fixture
    def publish(self, run: tuple[Config, Devices], tmp_path: Path) -> Callable[..., tuple[str, list[Path]]]:
        def write(scale: float) -> tuple[str, list[Path]]:
            training, path = SimulatedTraining(*run), tmp_path / f"{scale}.safetensors"
            training.initialise(int(scale * 10))
            return training.publish(path), [path]

        return write


class TestSimulatedTraining(TrainingEngineConformance):
    implements = "simulated"

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeEngine:
        run = simulated_devices(tmp_path, time_scale=1e-6)
        return lambda: SimulatedTraining(*run)
