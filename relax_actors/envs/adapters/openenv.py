"""Environment `openenv`: a server of OpenEnv by its WebSocket, without its package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from relax_actors.envs.environment import Environment, Step
from relax_actors.errors import ConfigError
from relax_actors.registry.dotted import import_extra, load

SETTING = "environment.name = 'openenv'"
MAX_SEED = 2**31
OPEN_SECONDS = 30.0


class OpenEnvEnvironment(Environment):
    """One session of an OpenEnv server an episode.

    Attributes:
        url: address of the server, e.g. "http://127.0.0.1:8000".
        field: field of the action that takes the model's text; "" takes the text as a JSON object, the whole action.
        shown: field of the observation that is shown; "" shows the observation as JSON.
        act: dotted path of a function text -> action (dict), in place of `field`.
        instructions: text before the first observation.
    """

    url: str
    field: str = "message"
    shown: str = ""
    act: str = ""
    instructions: str = ""

    _socket: Any

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check address, package websockets and function; raises ConfigError."""
        import_extra("websockets", "openenv", SETTING)
        if not options["url"].startswith(("http://", "https://", "ws://", "wss://")):
            msg = f"environment.options.url = {options['url']!r} is no address; write e.g. http://127.0.0.1:8000"
            raise ConfigError(msg)
        if options["act"]:
            load(options["act"], "environment.options.act")

    async def reset(self, task: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Connect and begin an episode, with the task's `metadata.reset` as arguments."""
        connect = import_extra("websockets.asyncio.client", "openenv", SETTING).connect
        self._act: Callable[..., Any] | None = load(self.act, "environment.options.act") if self.act else None  # type: ignore[assignment]
        address = self.url.replace("http", "ws", 1) if self.url.startswith("http") else self.url
        self._socket = await connect(f"{address.rstrip('/')}/ws", open_timeout=OPEN_SECONDS, max_size=None)
        given = (task.get("metadata") or {}).get("reset") or {}
        answer = await self._ask("reset", {"seed": int(rng.integers(MAX_SEED)), **given})
        return self.instructions + self._text(answer)

    async def step(self, action: str) -> Step:
        """Take an action. One that is no JSON object, where it must be, is answered with the reason."""
        try:
            chosen = self._action(action)
        except ValueError as error:
            return Step(f"Error: {error}", metrics={"invalid_actions": 1})
        answer = await self._ask("step", chosen)
        return Step(self._text(answer), answer.get("reward"), done=bool(answer.get("done")))

    async def close(self) -> None:
        """End the session."""
        await self._socket.send(json.dumps({"type": "close"}))
        await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        body = answer.get("data") or {}
        if answer.get("type") == "error":
            msg = f"the server refuses {kind}: {body.get('message', answer)}"
            raise RuntimeError(msg)
        return dict(body)

    def _action(self, text: str) -> dict[str, Any]:
        """Return the action of a text; raises ValueError if the text is no JSON object."""
        if self._act is not None:
            return dict(self._act(text))
        if self.field:
            return {self.field: text}
        chosen = json.loads(text)
        if not isinstance(chosen, dict):
            msg = f"{text[:80]!r} is no JSON object; write the action as one"
            raise ValueError(msg)  # noqa: TRY004 answered as JSON that does not decode
        return chosen

    def _text(self, answer: Mapping[str, Any]) -> str:
        observation = answer.get("observation", {})
        if self.shown and isinstance(observation, Mapping):
            observation = observation.get(self.shown, "")
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
