"""Environment `gymnasium`: observations and actions of Gymnasium written as text."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from relax_actors.envs.environment import Environment, Step
from relax_actors.errors import ConfigError
from relax_actors.registry.dotted import import_extra, load

SETTING = "environment.name = 'gymnasium'"
MAX_SEED = 2**31


class GymnasiumEnvironment(Environment):
    """Plays `gymnasium.make(id)`. The reward of an episode is the sum of its rewards.

    An action that cannot be read is answered with the reason, and the environment does not move.

    Attributes:
        id: id of a registered environment; `module:id` imports a module first.
        kwargs: further arguments of `gymnasium.make`.
        actions: text of each action of a Discrete space, in order, e.g. ["left", "down", "right", "up"]; without it the
            numbers are the texts. Actions of Text spaces are the model's texts.
        observe: dotted path of a function (observation, gym environment) -> text; by default the rendering of
            render_mode "ansi" where there is one, else the observation as JSON.
        act: dotted path of a function (text, gym environment) -> action; it raises ValueError for a text that is none.
        instructions: text before the first observation.
    """

    id: str
    kwargs: dict[str, Any] = {}  # noqa: RUF012 an option: every instance gets its own
    actions: tuple[str, ...] = ()
    observe: str = ""
    act: str = ""
    instructions: str = ""

    _env: Any

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Make the environment once; raises ConfigError if it or a function cannot be loaded."""
        for name in ("observe", "act"):
            if options[name]:
                load(options[name], f"environment.options.{name}")
        env = _make(options["id"], options["kwargs"])
        try:
            number = getattr(env.action_space, "n", None)
            if options["actions"] and number != len(options["actions"]):
                msg = (
                    f"environment.options.actions has {len(options['actions'])} texts, and {options['id']} has "
                    f"{'no Discrete actions' if number is None else f'{number} actions'}; give one for each"
                )
                raise ConfigError(msg)
            if number is None and not options["act"] and not _is_text(env.action_space):
                msg = (
                    f"environment.options.id = {options['id']!r} has actions {env.action_space}, which no text is; "
                    "name a function (text, gym environment) -> action in environment.options.act"
                )
                raise ConfigError(msg)
        finally:
            env.close()

    def reset(self, task: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Begin an episode; `metadata` of the task may hold `seed` and `options` of the reset."""
        metadata = task.get("metadata") or {}
        self._env = _make(self.id, self.kwargs)
        self._observe: Callable[..., Any] | None = _function(self.observe)
        self._act: Callable[..., Any] | None = _function(self.act)
        seed = metadata.get("seed", int(rng.integers(MAX_SEED)))
        observation, _ = self._env.reset(seed=seed, options=metadata.get("options"))
        return self.instructions + self._text(observation)

    def step(self, action: str) -> Step:
        """Take an action."""
        try:
            chosen = self._action(action.strip())
        except ValueError as error:
            return Step(f"Error: {error}", metrics={"invalid_actions": 1})
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        return Step(
            self._text(observation), float(reward), done=bool(terminated), truncated=bool(truncated and not terminated)
        )

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _action(self, text: str) -> Any:
        """Return the action that a text names; raises ValueError with the known actions."""
        if self._act is not None:
            return self._act(text, self._env)
        space = self._env.action_space
        if _is_text(space):
            return text
        known = list(self.actions) or [str(i) for i in range(int(space.n))]
        if text not in known:
            msg = f"{text[:80]!r} is no action; actions are {', '.join(known[:50])}"
            raise ValueError(msg)
        return int(getattr(space, "start", 0)) + known.index(text)

    def _text(self, observation: Any) -> str:
        if self._observe is not None:
            return str(self._observe(observation, self._env))
        if self._env.render_mode == "ansi":
            return str(self._env.render())
        return observation if isinstance(observation, str) else json.dumps(observation, default=_listed)


def _make(name: str, kwargs: Mapping[str, Any]) -> Any:
    gym = import_extra("gymnasium", "gymnasium", SETTING)
    module, _, own = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        entry = gym.spec(own).entry_point
        creator = gym.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
        modes = getattr(creator, "metadata", {}).get("render_modes", ())
        render = {"render_mode": "ansi"} if "ansi" in modes and "render_mode" not in kwargs else {}
        return gym.make(own, **render, **kwargs)
    except Exception as error:
        msg = f"environment.options.id = {name!r}: Gymnasium does not make it: {type(error).__name__}: {error}"
        raise ConfigError(msg) from error


def _is_text(space: Any) -> bool:
    return type(space).__name__ == "Text"


def _function(path: str) -> Any:
    return load(path, "environment.options") if path else None


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
