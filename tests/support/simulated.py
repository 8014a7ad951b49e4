"""Simulated devices, and a clock that does not wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_actors.config import Config, load_config
from relax_actors.simulation.devices import Devices
from relax_actors.simulation.durations import calibrated

EXAMPLES = Path(__file__).parents[2] / "examples" / "simulate"
DENSE = EXAMPLES / "qwen3_4b_16_h800.toml"


def simulated_devices(folder: Path, **simulate: Any) -> tuple[Config, Devices]:
    """Devices of an example, a thousand times as fast; `simulate` replaces settings of its section."""
    config = calibrated(load_config(DENSE))
    assert config.simulate is not None
    section = config.simulate.model_copy(update={"time_scale": 0.001, **simulate})
    return config.model_copy(update={"simulate": section}), Devices(section, folder)


class Clock:
    """Time that passes by sleeping alone, in place of module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
