"""The backends `rollout.backend = "simulated"` and `trainer.backend = "simulated"`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import safetensors.numpy
import xxhash

from relax_actors.config import Config
from relax_actors.config.simulate import SimulateSection
from relax_actors.data.model_folder import measure
from relax_actors.engines.protocols import InferenceEngine, TrainingEngine
from relax_actors.engines.protocols.backend import InferenceBackend, TrainingBackend
from relax_actors.engines.protocols.footprint import Footprint
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.training import StepResult
from relax_actors.errors import ConfigError
from relax_actors.runtime import Context
from relax_actors.simulation.devices import CHECKPOINT, PUBLISH, SWITCH, Devices
from relax_actors.simulation.durations import training_seconds
from relax_actors.simulation.inference import SimulatedInference

WEIGHTS = "model.safetensors"


class SimulatedTraining:
    """The trainer's devices; see the protocol for the methods."""

    shards: ClassVar = 1

    def __init__(self, config: Config, devices: Devices) -> None:
        self._devices, self._seed = devices, config.run.seed
        self._steps, self._digest = 0, b""
        self._rows: list[TrainSample] = []
        # Of the step under way: the time that its rows so far have taken.
        self._spent = 0.0
        self._samples = config.trainer.prompts_per_step * config.rollout.group_size
        training_seconds(devices.simulate, 0)

    def initialise(self, seed: int) -> None:
        """Weights from a seed."""
        self._steps, self._digest = 0, str(seed).encode()

    def warm_start(
        self, samples: Sequence[TrainSample], learning_rate: float, progress: Callable[[], None]
    ) -> StepResult:
        """Takes no time."""
        del samples, learning_rate
        progress()
        return StepResult({"loss": 0.0})

    def finish_warm_start(self) -> None:
        """There is no optimizer."""

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Take the rows' share of a step's time; on shared devices all of it is the step's."""
        devices = self._devices
        self._rows.extend(samples)
        if devices.simulate.placement == "separate":
            section = devices.simulate.training
            whole = training_seconds(devices.simulate, self._seed + self._steps)
            fixed = 0.0 if section.step is not None else section.fixed
            share = (whole - fixed) * sum(sample.share for sample in samples) / self._samples
            self._spent += share
            devices.elapse(share, progress)

    def discard(self) -> None:
        """Forget rows."""
        self._rows.clear()
        self._spent = 0.0

    def step(self, step: int, progress: Callable[[], None]) -> StepResult:
        """Take the devices, what is left of the time of a step, and its rows into the digest."""
        devices, seed = self._devices, self._seed + step
        with devices.training(progress):
            if devices.simulate.placement == "colocated":
                devices.elapse_phase(SWITCH, seed, progress)
            devices.elapse(training_seconds(devices.simulate, seed) - self._spent, progress)
        hasher = xxhash.xxh3_128(self._digest)
        for sample in self._rows:
            hasher.update(sample.masked("token_ids").data)
            hasher.update(sample.masked("advantages").data)
        self.discard()
        self._digest, self._steps = hasher.digest(), step + 1
        return StepResult({"loss": 0.0, "grad_norm": 0.0})

    def _bytes(self) -> bytes:
        tensors = {"digest": np.frombuffer(xxhash.xxh3_128_digest(self._digest), np.uint8)}
        data: bytes = safetensors.numpy.save(tensors)
        return data

    def publish(self, *paths: Path) -> str:
        """Write the weights; takes the time of `simulate.phases.publish`."""
        self._devices.elapse_phase(PUBLISH, self._seed + self._steps, lambda: None)
        paths[0].write_bytes(self._bytes())
        return self.fingerprint()

    def remember(self) -> None:
        """Deltas are not simulated."""

    def delta(self) -> None:
        """Deltas are not simulated."""

    def fingerprint(self) -> str:
        """Of the bytes that `publish` writes."""
        return xxhash.xxh3_128_hexdigest(self._bytes())

    def save(self, folder: Path) -> None:
        """Write a checkpoint; takes the time of `simulate.phases.checkpoint`."""
        self._devices.elapse_phase(CHECKPOINT, self._seed + self._steps, lambda: None)
        (folder / "digest").write_bytes(self._steps.to_bytes(8, "little") + self._digest)

    def load(self, folder: Path) -> None:
        """Take a checkpoint."""
        data = (folder / "digest").read_bytes()
        self._steps, self._digest = int.from_bytes(data[:8], "little"), data[8:]

    def export(self, folder: Path) -> None:
        """Write the weights."""
        (folder / WEIGHTS).write_bytes(self._bytes())


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
