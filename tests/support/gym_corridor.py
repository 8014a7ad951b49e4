"""Environment of Gymnasium for tests: walk three fields to the right."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium


class Corridor(gymnasium.Env[int, int]):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"]}
    observation_space = gymnasium.spaces.Discrete(3)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._at = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._at = 0
        return self._at, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self._at = max(0, self._at + (1 if action else -1))
        done = self._at == 2
        return self._at, float(done), done, False, {}

    def render(self) -> str:
        return "".join("@" if i == self._at else "." for i in range(3))


gymnasium.register("Corridor-v0", Corridor, max_episode_steps=20)
