"""Tasks with pictures for the tests' tiny runs, and files of all kinds of media."""

from __future__ import annotations

import time
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np

from relax_actors.data.task import Medium, Task
from relax_actors.envs import Environment, Observation, Step
from relax_actors.messages import Prompt


def png(seed: int, width: int = 32, height: int = 16) -> bytes:
    """Return a picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return bytes(cv2.imencode(".png", pixels)[1].tobytes())


def write_video(path: Path, frames: int = 8, side: int = 32) -> Path:
    """Write a video of random frames, 8 a second."""
    generator = np.random.default_rng(frames)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        for _ in range(frames):
            pixels = generator.integers(0, 256, (side, side, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def write_sound(path: Path, seconds: float = 0.5) -> Path:
    """Write a sound of 440 Hz."""
    at = np.arange(int(16_000 * seconds)) / 16_000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((8000 * np.sin(2 * np.pi * 440 * at)).astype("<i2").tobytes())
    return path


class Look(Environment):
    """Shows a picture that follows from the seed and the action; actions with a 7 earn a reward.

    Attributes:
        pause: longest time of a step in seconds.
        opens: whether the first observation holds a picture, too.
        turns: actions of an episode.
    """

    pause: float = 0.0
    opens: bool = False
    turns: int = 3

    def reset(self, task: Any, rng: np.random.Generator) -> Observation:
        self.rng, self.taken, self.media = rng, 0, task.get("media", [])
        return self.shown("") if self.opens else ""

    def step(self, action: str) -> Step:
        time.sleep(self.pause * self.rng.random())
        self.taken += 1
        reward = action.count("7") / self.turns
        return Step(self.shown(action), reward, self.taken == self.turns, {"media": len(self.media)})

    def shown(self, action: str) -> list[dict[str, Any]]:
        """Return a text of half of the turns, then one or two pictures, as bytes or as pixels."""
        seed = int(self.rng.integers(50)) + len(action)
        pixels = np.random.default_rng(seed).integers(0, 256, (16, 16 + 16 * (seed % 3), 3), np.uint8)
        texts = [{"type": "text", "text": f"{seed % 10}>"}] * (seed % 2)
        pictures = [{"type": "image", "bytes": png(seed)}, {"type": "image", "image": pixels}]
        return [*texts, *pictures[: 1 + seed % 2], {"type": "text", "text": ">"}]


def make(*, size: int | None, seed: int) -> list[Task]:
    """Tasks with a picture each; every seventh has two of one file, every fifth none."""
    tasks = []
    for i in range(size or 100):
        medium = Medium("image", data=png(i % 20 + seed))
        count = 0 if i % 5 == 4 else 2 if i % 7 == 6 else 1
        tasks.append(Task(f"{'<image>' * count}{i % 10}>", str(i % 10), {"i": i}, media=(medium,) * count))
    return tasks


def pairs(*, size: int | None, seed: int) -> list[Task]:
    """The tasks of `make`, each with a chosen and a rejected answer."""
    tasks = make(size=size, seed=seed)
    return [
        replace(task, answer="", metadata={"i": i, "chosen": str(i), "rejected": str(9 * i + 1)})
        for i, task in enumerate(tasks)
    ]


def share_of_sevens(completion: str, prompt: Prompt) -> float:
    return completion.count("7") / max(1, len(completion))
