"""Simulated devices: what runs on them, whose turn it is, and time as it passes there.

The actors of a run share two small files in its folder. `samples` holds how many samples each rollout actor has
running: from their sum every actor knows how fast it is. Two locks let the trainer and the rollout take turns.
"""

from __future__ import annotations

import fcntl
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from relax_actors.config.simulate import Distribution, SimulateSection
from relax_actors.simulation.times import draw, generator_of

ACTORS = 4096
TICK = 0.05
TURN_SECONDS = 0.01
REWARD, LOAD, PUBLISH, CHECKPOINT, SWITCH = "reward", "load", "publish", "checkpoint", "switch"


class Devices:
    """The devices of a run as one actor sees them.

    Args:
        simulate: the cluster, its times known.
        folder: the run's folder.
    """

    def __init__(self, simulate: SimulateSection, folder: Path) -> None:
        self.simulate = simulate
        self._folder = folder / "simulated"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.running = self._map()
        """Samples that each rollout actor has running, `[ACTORS] int32`."""
        self._gate, self._held = self._folder / "gate", self._folder / "held"

    def _map(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        path = self._folder / "samples"
        with path.open("a+b") as file:
            file.truncate(4 * ACTORS)
            return np.frombuffer(mmap.mmap(file.fileno(), 4 * ACTORS), np.int32)

    def spend(self, seconds: float, progress: Callable[[], None]) -> None:
        """Let simulated seconds pass."""
        end = time.monotonic() + seconds * self.simulate.time_scale
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            progress()

    def spend_phase(self, name: str, seed: int, progress: Callable[[], None]) -> None:
        """Let a phase of [simulate.phases] pass, drawn by a seed."""
        phase: Distribution = getattr(self.simulate.phases, name)
        self.spend(float(draw(phase, generator_of(seed))[0]), progress)

    @contextmanager
    def generating(self, progress: Callable[[], None]) -> Iterator[None]:
        """The rollout's turn, shared by its actors; at once if devices are not shared."""
        if self.simulate.placement == "separate":
            yield
            return
        with ExitStack() as turn:
            # A trainer that waits holds the gate, so that generation cannot keep it out for ever.
            with _locked(self._gate, fcntl.LOCK_EX, progress):
                turn.enter_context(_locked(self._held, fcntl.LOCK_SH, progress))
            yield

    @contextmanager
    def training(self, progress: Callable[[], None]) -> Iterator[None]:
        """The trainer's turn; at once if devices are not shared."""
        if self.simulate.placement == "separate":
            yield
            return
        with _locked(self._gate, fcntl.LOCK_EX, progress), _locked(self._held, fcntl.LOCK_EX, progress):
            yield


@contextmanager
def _locked(path: Path, how: int, progress: Callable[[], None]) -> Iterator[None]:
    """Hold a lock; it is free again when the file is closed or the process ends."""
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(TURN_SECONDS)
                progress()
        yield
