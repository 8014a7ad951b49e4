"""Simulated devices shared by the actors of a run: load, turns and simulated time.

The actors share three small files in the run's folder. `samples` holds the number of running samples of each rollout
actor; every actor derives its speed from the sum. Two lock files let trainer and rollout take turns on the devices.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from broker.files import open_lock
from relax_actors.config.simulate import Distribution, SimulateSection
from relax_actors.simulation.durations import draw, random_generator

MAX_ACTORS = 4096
TICK_SECONDS = 0.05
"""Longest time after which a rollout actor reads the load of the devices again."""
LOCK_POLL_SECONDS = 0.01
REWARD, LOAD, PUBLISH, CHECKPOINT, SWITCH = "reward", "load", "publish", "checkpoint", "switch"


class Devices:
    """The devices of a run, as used by one actor."""

    def __init__(self, simulate: SimulateSection, folder: Path) -> None:
        self.simulate = simulate
        self._folder = folder / "simulated"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.running = self._map_counts()
        """Running samples of each rollout actor, `[MAX_ACTORS] int32`, shared by all processes of the run."""
        self._gate, self._turn = self._folder / "gate", self._folder / "held"

    def _map_counts(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        path = self._folder / "samples"
        with path.open("a+b") as file:
            file.truncate(4 * MAX_ACTORS)
            return np.frombuffer(mmap.mmap(file.fileno(), 4 * MAX_ACTORS), np.int32)

    def elapse(self, seconds: float, progress: Callable[[], None]) -> None:
        """Sleep for simulated seconds, scaled by `simulate.time_scale`.

        Calls `progress` at least once a second.
        """
        end = time.monotonic() + seconds * self.simulate.time_scale
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            progress()

    def elapse_phase(self, name: str, seed: int, progress: Callable[[], None]) -> None:
        """Sleep for a phase of [simulate.phases], whose duration is drawn from `seed`."""
        phase: Distribution = getattr(self.simulate.phases, name)
        self.elapse(float(draw(phase, random_generator(seed))[0]), progress)

    @contextmanager
    def generating(self, progress: Callable[[], None]) -> Iterator[None]:
        """Hold the rollout's turn, which its actors share; no wait if the devices are not colocated."""
        if self.simulate.placement == "separate":
            yield
            return
        with ExitStack() as turn:
            # A waiting trainer holds the gate; without it, overlapping rollout actors would starve the trainer.
            with _locked(self._gate, fcntl.LOCK_EX, progress):
                turn.enter_context(_locked(self._turn, fcntl.LOCK_SH, progress))
            yield

    @contextmanager
    def training(self, progress: Callable[[], None]) -> Iterator[None]:
        """Hold the trainer's turn; no wait if the devices are not colocated."""
        if self.simulate.placement == "separate":
            yield
            return
        with _locked(self._gate, fcntl.LOCK_EX, progress), _locked(self._turn, fcntl.LOCK_EX, progress):
            yield


@contextmanager
def _locked(path: Path, mode: int, progress: Callable[[], None]) -> Iterator[None]:
    """Hold a lock; the kernel frees it when the file is closed or the process ends."""
    with os.fdopen(open_lock(path), "rb") as file:
        while True:
            try:
                fcntl.flock(file, mode | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_POLL_SECONDS)
                progress()
        yield
