"""Rewards and environments that `relax check` calls."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from relax_actors.envs import Environment, Step
from relax_actors.messages import Prompt, Sample


def length(completion: str, prompt: Prompt, sample: Sample) -> float:
    """Read everything, and print."""
    print('{"reward": 99}')  # noqa: T201 must not be taken for the result
    assert sample.text == completion == prompt.answer
    return float(len(completion))


def leaving(completion: str, prompt: Prompt) -> float:
    """Leave a process behind, as a pool of workers does."""
    del completion, prompt
    if os.fork() == 0:
        time.sleep(600)
    return 1.0


def measuring(completion: str, prompt: Prompt, sample: Sample) -> float:
    """Divide by what no episode has none of, and read what an environment of one's own reports."""
    del completion, prompt
    return sample.metrics["environment/moves"] / sample.metrics["turns"] / len(sample.tokens) / len(sample.messages)


def raising(completion: str, prompt: Prompt) -> float:
    del completion
    return float(prompt.metadata["level"])


def not_finite(completion: str, prompt: Prompt) -> float:
    del completion, prompt
    return float("nan")


def hanging(completion: str, prompt: Prompt) -> float:
    del completion, prompt
    time.sleep(600)
    return 0.0


def crashing(completion: str, prompt: Prompt) -> float:
    del completion, prompt
    os.write(2, b"no such device\n")
    os._exit(7)


def forging(completion: str, prompt: Prompt) -> float:
    """Write into every open file."""
    del completion, prompt
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.write(descriptor, b'{"reward": "much"}')
    os._exit(0)


def greedy(completion: str, prompt: Prompt) -> float:
    """Use 1 GiB."""
    del completion, prompt
    return float(np.ones(1 << 27)[0])


def reading(completion: str, prompt: Prompt) -> float:
    """Read a file of the user, which a sandbox does not show."""
    del completion, prompt
    return float(Path(os.environ["TRIED_FILE"]).exists())


class Echo(Environment):
    """Reward the answer."""

    fails: str = ""

    def reset(self, task: Mapping[str, Any], rng: np.random.Generator) -> str:
        del rng
        self._answer = task["answer"]
        if self.fails == "reset":
            text = "no board"
            raise LookupError(text)
        return "?"

    def step(self, action: str) -> Step:
        if self.fails == "step":
            text = "no move"
            raise LookupError(text)
        return Step(done=True, reward=float(action == self._answer))
