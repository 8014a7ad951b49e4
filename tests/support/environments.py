"""Environments of tests: one that behaves, and one that does each thing that no environment may do."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import numpy as np

from relax_actors.envs import Environment, Step


class GuessNumber(Environment):
    """Find a hidden number from hints."""

    limit: int = 15

    def reset(self, task: Any, rng: np.random.Generator) -> str:
        self.secret = int(rng.integers(self.limit + 1))
        return "?"

    def step(self, action: str) -> Step:
        guess = int(action) if action.isdigit() else -1
        if guess == self.secret:
            return Step(done=True, reward=1.0, metrics={"guess": guess})
        return Step("<" if self.secret < guess else ">", reward=0.0)


class AsyncCounter(Environment):
    """Counts its turns; gives its state away and is restored from it."""

    async def reset(self, task: Any, rng: np.random.Generator) -> list[dict[str, str]]:
        self.count = 0
        return [{"role": "system", "content": "count"}, {"role": "user", "content": "0"}]

    async def step(self, action: str) -> str:
        self.count += 1
        return str(self.count)

    async def state(self) -> bytes:
        return str(self.count).encode()

    async def restore(self, state: bytes) -> None:
        self.count = int(state)


class Echo(Environment):
    """Answers the action, the process id and the number of turns; `pause:<seconds>` sleeps."""

    def reset(self, task: Any, rng: np.random.Generator) -> str:
        self.turns = 0
        return ""

    def step(self, action: str) -> str:
        self.turns += 1
        if action.startswith("pause:"):
            time.sleep(float(action.partition(":")[2]))
        return f"{action} {os.getpid()} {self.turns}"


class Random(Environment):
    """Answers what no replay can give again."""

    def reset(self, task: Any, rng: np.random.Generator) -> str:
        return ""

    def step(self, action: str) -> str:
        return str(time.monotonic_ns())


class Misbehaving(Environment):
    """Does what the action says."""

    def reset(self, task: Any, rng: np.random.Generator) -> str:
        return "ready"

    def step(self, action: str) -> Any:  # noqa: C901, PLR0911, PLR0912 one branch for each
        match action:
            case "raise":
                raise KeyError("no such move")
            case "exit":
                sys.exit("enough")
            case "hang":
                time.sleep(1000)
            case "spin":
                while True:
                    pass
            case "crash":
                ctypes.string_at(0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "memory":
                return "x" * (16 << 30)
            case "garbage":
                for descriptor in range(3, 64):
                    try:
                        os.write(descriptor, b"\0\0\0\4junk")
                    except OSError:
                        continue
                time.sleep(1000)
            case "nan":
                return Step("a", reward=float("nan"))
            case "reward":
                return Step("a", reward="much")  # type: ignore[arg-type]
            case "done":
                return Step("a", done="yes")  # type: ignore[arg-type]
            case "metric":
                return Step("a", metrics={"m": float("inf")})
            case "none":
                return None
            case "number":
                return 3
            case "utf8":
                return "\udcff"
            case "role":
                return {"role": "root", "content": "x"}
            case "content":
                return {"role": "user", "content": 3}
            case "large":
                return "x" * (2 << 20)
        return "ok"
