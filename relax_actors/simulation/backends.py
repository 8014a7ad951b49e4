"""The backends `rollout.backend = "simulated"` and `trainer.backend = "simulated"`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relax_actors.config import Config
from relax_actors.config.simulate import SimulateSection
from relax_actors.data.model_folder import measure
from relax_actors.engines.protocols import InferenceEngine, TrainingEngine
from relax_actors.engines.protocols.backend import InferenceBackend, TrainingBackend
from relax_actors.engines.protocols.footprint import Footprint
from relax_actors.errors import ConfigError
from relax_actors.runtime import Context
from relax_actors.simulation.devices import Devices
from relax_actors.simulation.inference import SimulatedInference
from relax_actors.simulation.training import SimulatedTraining

SIMULATED = Footprint(process_bytes=20 << 20, gpus=0)


class SimulatedInferenceBackend(InferenceBackend):
    """Simulated generation; implements `InferenceBackend`."""

    def build(self, context: Context) -> InferenceEngine:
        """Attach to the run's simulated devices."""
        config = context.config
        devices = Devices(_section(config), context.folder.root)
        length = measure(config.model_path).context_length
        return SimulatedInference(devices, context.n, length, config.rollout.max_concurrent_prompts)

    def footprint(self, config: Config) -> Footprint:
        """Return the memory of a process without torch."""
        del config
        return SIMULATED


class SimulatedTrainingBackend(TrainingBackend):
    """Simulated training; implements `TrainingBackend`."""

    def build(self, context: Context) -> TrainingEngine:
        """Attach to the run's simulated devices."""
        return SimulatedTraining(context.config, Devices(_section(context.config), context.folder.root))

    def check(self, config: Config, model: Path) -> Iterator[str]:
        """Find nothing to refuse."""
        del config, model
        yield from ()

    def footprint(self, config: Config) -> Footprint:
        """Return the memory of a process without torch."""
        del config
        return SIMULATED


def _section(config: Config) -> SimulateSection:
    if config.simulate is None:
        msg = 'backend = "simulated" needs a section [simulate]; add it, or choose another backend'
        raise ConfigError(msg)
    return config.simulate
