"""Parts of the runs of benchmarks/agents.py: an engine that takes a given time a token, an environment, tasks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from relax_actors.data.task import Task
from relax_actors.engines.protocols import Generation, GenerationRequest, InferenceEngine
from relax_actors.engines.protocols.backend import InferenceBackend
from relax_actors.engines.protocols.inference import Done, MoreRequests, Refresh, no_more_requests
from relax_actors.envs import Environment, Step
from relax_actors.messages import FinishReason
from relax_actors.roles.turn_rollout import TurnRollout
from relax_actors.runtime import Context

TOKENS = 8
"""Tokens of a turn."""
COUNT, BUSY = "TURNS_FILE", "BUSY_FILE"
"""Environment variables with files: the engine appends a byte a turn; the seconds in which at least one turn ran
and, of these, the seconds beyond those of its tokens, which the rollout needs between two tokens."""


class Count(Environment):
    """Ends after `turns` turns; each takes from `shortest` to `longest` seconds, drawn uniformly."""

    turns: int = 5
    shortest: float = 0.0
    longest: float = 0.0

    def reset(self, task: Any, rng: np.random.Generator) -> str:
        """Begin."""
        del task
        self._left, self._rng = self.turns, rng
        return ""

    def step(self, action: str) -> Step:
        """Take a turn."""
        del action
        if self.longest:
            time.sleep(float(self._rng.uniform(self.shortest, self.longest)))
        self._left -= 1
        return Step("1>", reward=float(self._rng.random()), done=not self._left)


class Barrier(TurnRollout):
    """Rollout that waits for all environments before each turn."""

    def has_barrier(self) -> bool:
        """Return true."""
        return True


class PacedBackend(InferenceBackend):
    """Backend of `PacedEngine`; option `token_seconds`."""

    def build(self, context: Context) -> InferenceEngine:
        """Load the model, whose weights are received but not used."""
        from relax_actors.engines.transformers.engine import TransformersEngine  # noqa: PLC0415

        class PacedEngine(TransformersEngine):
            """Generates `TOKENS` tokens a turn, in lockstep, and computes nothing."""

            def stream(
                self,
                requests: Sequence[GenerationRequest],
                progress: Callable[[], None],
                refresh: Refresh | None = None,
                more: MoreRequests = no_more_requests,
            ) -> Iterator[Done]:
                """Generate."""
                del refresh
                return paced(self.require_weights(), requests, progress, more, seconds)

        seconds = float(context.config.rollout.options.get("token_seconds", 0.0))
        return PacedEngine(context.config.model_path, kept_bytes=0)


def paced(
    version: int,
    requests: Sequence[GenerationRequest],
    progress: Callable[[], None],
    more: MoreRequests,
    seconds: float,
) -> Iterator[Done]:
    """Generate requests, and those that join, one token of all of them a time."""
    numbers, busy, own, began = count(), 0.0, 0.0, time.monotonic()
    running = {next(numbers): 0 for _ in requests}
    files = [os.open(os.environ[name], os.O_WRONLY | os.O_APPEND | os.O_CREAT) for name in (COUNT, BUSY)]
    try:
        while running:
            progress()
            if seconds:
                start = time.monotonic()
                time.sleep(seconds)
                own += time.monotonic() - start
            running = {number: done + 1 for number, done in running.items()}
            if ended := [number for number, done in running.items() if done == TOKENS]:
                for number in ended:
                    del running[number]
                busy += 0.0 if running else time.monotonic() - began
                os.write(files[0], b"." * len(ended))
                yield [(number, [_generation(version, number)]) for number in ended]
            arrived = more(0)
            began = began if running else time.monotonic()
            running |= {next(numbers): 0 for _ in arrived}
    finally:
        os.write(files[1], f"{busy} {busy - own}\n".encode())
        for file in files:
            os.close(file)


def _generation(version: int, number: int) -> Generation:
    tokens = np.full(TOKENS, number % 10, np.int32)
    logprobs, versions = np.full(TOKENS, -1.0, np.float32), np.full(TOKENS, version, np.int32)
    return Generation(tokens, logprobs, versions, FinishReason.STOP)


def make(*, size: int | None, seed: int) -> list[Task]:
    """Make tasks of a digit."""
    del seed
    return [Task(f"{i % 10}>", "") for i in range(size or 100)]
