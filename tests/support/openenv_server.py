"""OpenEnv server of tests: `python -m tests.support.openenv_server <port>`; counts down from the seed modulo 3."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Countdown(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._left = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Heard:
        self._left = 2
        return Heard(text=f"begin {given.get('word', '')}", done=False, reward=None)

    def step(self, action: Say, **given: Any) -> Heard:
        self._left -= 1
        return Heard(text=f"{action.message} {self._left}", done=self._left == 0, reward=0.5)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Countdown, Say, Heard, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
