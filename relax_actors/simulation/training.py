"""Simulated training engine, whose weights are a digest of all steps.

A replay can be verified by the digest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy
import xxhash

from relax_actors.config import Config
from relax_actors.engines.protocols.sequences import Sequences
from relax_actors.engines.protocols.training import StepResult, TrainBatch
from relax_actors.simulation.devices import CHECKPOINT, PUBLISH, SWITCH, Devices
from relax_actors.simulation.durations import training_seconds

WEIGHTS = "model.safetensors"


class SimulatedTraining:
    """Takes the time of training on simulated devices; implements `TrainingEngine`.

    Args:
        config: of the run.
        devices: of the run.
    """

    def __init__(self, config: Config, devices: Devices) -> None:
        self._devices, self._seed = devices, config.run.seed
        self._steps, self._digest = 0, b""
        self._rows: list[TrainBatch] = []
        # Simulated seconds that the accumulated rows of the current step have taken.
        self._elapsed = 0.0
        self._samples = config.trainer.prompts_per_step * config.rollout.group_size
        training_seconds(devices.simulate, 0)  # raises early if the duration is unknown

    def initialise(self, seed: int) -> None:
        """Set the digest from a seed."""
        self._steps, self._digest = 0, str(seed).encode()

    def warm_start(self, sequences: Sequences, learning_rate: float, progress: Callable[[], None]) -> StepResult:
        """Do nothing; takes no simulated time."""
        del sequences, learning_rate
        progress()
        return StepResult({"loss": 0.0})

    def finish_warm_start(self) -> None:
        """Do nothing: there is no optimizer."""

    def accumulate(self, batch: TrainBatch, progress: Callable[[], None]) -> None:
        """Take the rows' share of the step's time; on colocated devices `step` takes all of it."""
        devices = self._devices
        self._rows.append(batch)
        if devices.simulate.placement == "separate":
            section = devices.simulate.training
            total = training_seconds(devices.simulate, self._seed + self._steps)
            fixed = 0.0 if section.step is not None else section.fixed
            share = (total - fixed) * len(batch.advantages) / self._samples
            self._elapsed += share
            devices.elapse(share, progress)

    def discard(self) -> None:
        """Forget the accumulated rows."""
        self._rows.clear()
        self._elapsed = 0.0

    def step(self, step: int, progress: Callable[[], None]) -> StepResult:
        """Take the remaining time of the step on the devices; add its rows to the digest."""
        devices, seed = self._devices, self._seed + step
        with devices.training(progress):
            if devices.simulate.placement == "colocated":
                devices.elapse_phase(SWITCH, seed, progress)
            devices.elapse(training_seconds(devices.simulate, seed) - self._elapsed, progress)
        hasher = xxhash.xxh3_128(self._digest)
        for part in self._rows:
            for tokens in part.sequences.completions:
                hasher.update(np.ascontiguousarray(tokens).data)
            hasher.update(np.ascontiguousarray(part.advantages).data)
        self.discard()
        self._digest, self._steps = hasher.digest(), step + 1
        return StepResult({"loss": 0.0, "gradient_norm": 0.0})

    def _bytes(self) -> bytes:
        tensors = {"digest": np.frombuffer(xxhash.xxh3_128_digest(self._digest), np.uint8)}
        data: bytes = safetensors.numpy.save(tensors)
        return data

    def publish(self, path: Path) -> str:
        """Write the digest as weights; takes the time of `simulate.phases.publish`."""
        self._devices.elapse_phase(PUBLISH, self._seed + self._steps, lambda: None)
        path.write_bytes(self._bytes())
        return self.fingerprint()

    def remember(self) -> None:
        """Do nothing: deltas are not simulated."""

    def delta(self) -> None:
        """Return None: deltas are not simulated."""

    def fingerprint(self) -> str:
        """Return the fingerprint of the bytes that `publish` writes."""
        return xxhash.xxh3_128_hexdigest(self._bytes())

    def save(self, folder: Path) -> None:
        """Write a checkpoint; takes the time of `simulate.phases.checkpoint`."""
        self._devices.elapse_phase(CHECKPOINT, self._seed + self._steps, lambda: None)
        (folder / "digest").write_bytes(self._steps.to_bytes(8, "little") + self._digest)

    def load(self, folder: Path) -> None:
        """Load a checkpoint."""
        data = (folder / "digest").read_bytes()
        self._steps, self._digest = int.from_bytes(data[:8], "little"), data[8:]

    def export(self, folder: Path) -> None:
        """Write the digest as a weight file."""
        (folder / WEIGHTS).write_bytes(self._bytes())
