"""Check and convert what environments return: nothing of it is trusted."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relax_actors.envs.environment import Step
from relax_actors.envs.media_bytes import with_bytes
from relax_actors.messages import EnvironmentAnswer

MAX_STATE_BYTES = 1 << 20
MAX_METRICS = 64
MAX_NUMBER = 1e30
"""Largest reward or metric, so that the rewards of an episode add up to a number that fits in float32."""
_METRIC_NAME = re.compile(r"[\w./-]{1,48}", re.ASCII)
"""Trajectories accept 64 characters, of which a prefix takes some."""
ROLES = ("user", "tool", "system", "assistant")
_DEPTH = 16
_PLAIN = (type(None), bool, int, float)


class EnvironmentFaultError(Exception):
    """Failure of an environment, not of an action; it ends the sample unseen by the model."""


def answer_of(result: Any, session: str, turn: int, max_bytes: int, players: Sequence[str] = ()) -> EnvironmentAnswer:
    """Convert what `reset` (turn -1) or `step` returned; `players` may be empty.

    Raises:
        EnvironmentFaultError: the result has a wrong type, is not UTF-8, too large, holds a number that is not finite,
            names an unknown player, or is a reward of `reset`.
    """
    method = "reset()" if turn < 0 else "step()"
    step = result if isinstance(result, Step) else Step(result)
    messages = messages_of(step.observation, method)
    size = sum(_size(message["content"]) for message in messages)
    if size > max_bytes:
        msg = f"{method} returned an observation of {size} bytes; environment.max_observation_bytes is {max_bytes}"
        raise EnvironmentFaultError(msg)
    for name in ("done", "truncated"):
        if not isinstance(getattr(step, name), bool | np.bool_):
            msg = f"{method} returned Step({name}={getattr(step, name)!r:.80}); {name} is True or False"
            raise EnvironmentFaultError(msg)
    if step.reward is not None and turn < 0:
        msg = f"reset() returned reward {step.reward!r:.80}; a reward answers an action: return it from step()"
        raise EnvironmentFaultError(msg)
    if not isinstance(step.player, str):
        msg = f"{method} returned Step(player={step.player!r:.80}); player is a name, or empty for the same player"
        raise EnvironmentFaultError(msg)
    by_player = step.reward if isinstance(step.reward, Mapping) else {}
    if unknown := [name for name in (*by_player, *filter(None, [step.player])) if name not in players]:
        known = f"environment.players are {', '.join(players)}" if players else "environment.players is not set"
        msg = f"{method} names the player {unknown[0]!r:.80}; {known}"
        raise EnvironmentFaultError(msg)
    is_number = step.reward is not None and not isinstance(step.reward, Mapping)
    return EnvironmentAnswer(
        session,
        turn,
        messages,
        _number(step.reward, method, "reward") if is_number else None,
        done=bool(step.done),
        truncated=bool(step.truncated),
        metrics=_metrics(step.metrics, method),
        player=str(step.player),
        rewards={str(name): _number(value, method, f"reward of {name}") for name, value in by_player.items()},
    )


def checked_state(state: Any) -> bytes | None:
    """Return the result of `Environment.state`; raises EnvironmentFaultError for bad ones."""
    if state is None or (isinstance(state, bytes) and len(state) <= MAX_STATE_BYTES):
        return state
    what = f"{len(state)} bytes" if isinstance(state, bytes) else f"a {type(state).__name__}"
    msg = f"state() returned {what}; return at most {MAX_STATE_BYTES} bytes, or None to have the actions replayed"
    raise EnvironmentFaultError(msg)


def messages_of(observation: Any, method: str = "step()") -> list[dict[str, Any]]:
    """Convert an observation to chat messages, an empty text to none.

    Raises:
        EnvironmentFaultError: it is neither a text nor messages.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": _text(observation, method)}] if observation else []
    if isinstance(observation, Mapping):
        return [_message(observation, method)]
    if isinstance(observation, Sequence) and not isinstance(observation, bytes | bytearray):
        items = list(observation)
        if items and all(isinstance(item, Mapping) and "role" not in item for item in items):
            return [{"role": "user", "content": _content(items, method)}]
        if all(isinstance(item, Mapping) for item in items):
            return [_message(item, method) for item in items]
    msg = (
        f"{method} returned a {type(observation).__name__} as the observation: {observation!r:.80}; return a text, a "
        "message, a list of messages, or a list of content parts"
    )
    raise EnvironmentFaultError(msg)


def _message(message: Mapping[str, Any], method: str) -> dict[str, Any]:
    if message.get("role") not in ROLES:
        msg = f"{method} returned a message with role {message.get('role')!r:.80}; roles are {', '.join(ROLES)}"
        raise EnvironmentFaultError(msg)
    others = {name: _plain(value, method) for name, value in message.items() if name != "content"}
    content = message.get("content", "")
    return others | {"content": _text(content, method) if isinstance(content, str) else _content(content, method)}


def _content(parts: Any, method: str) -> list[dict[str, Any]]:
    if not isinstance(parts, list | tuple) or not all(isinstance(p, Mapping) and "type" in p for p in parts):
        msg = (
            f"{method} returned a message with content {parts!r:.80}; content is a text or a list of parts such as "
            '{"type": "text", "text": ...}'
        )
        raise EnvironmentFaultError(msg)
    try:
        return [{str(name): _plain(v, method) for name, v in with_bytes(dict(part)).items()} for part in parts]
    except ValueError as error:
        msg = f"{method} returned {error}"
        raise EnvironmentFaultError(msg) from error


def _plain(value: Any, method: str, depth: int = 0) -> Any:
    """Return plain data with checked texts; bytes are kept, for media."""
    if isinstance(value, str):
        return _text(value, method)
    if isinstance(value, bytes) or type(value) in _PLAIN:
        return value
    if depth < _DEPTH and isinstance(value, list | tuple):
        return [_plain(item, method, depth + 1) for item in value]
    if depth < _DEPTH and isinstance(value, Mapping):
        return {_text(name, method): _plain(item, method, depth + 1) for name, item in value.items()}
    msg = f"{method} returned {value!r:.80} within an observation; use texts, numbers, bytes, lists and dicts"
    raise EnvironmentFaultError(msg)


def _text(text: Any, method: str) -> str:
    try:
        if isinstance(text, str):
            text.encode()
            return str(text)
    except UnicodeEncodeError as error:
        msg = f"{method} returned a text that is not UTF-8: {error.reason} at character {error.start}"
        raise EnvironmentFaultError(msg) from error
    msg = f"{method} returned {text!r:.80} within an observation where a text belongs"
    raise EnvironmentFaultError(msg)


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(_size, value))
    if isinstance(value, dict):
        return sum(_size(name) + _size(item) for name, item in value.items())
    return 8


def _number(value: Any, method: str, what: str) -> float:
    if isinstance(value, bool | int | float | np.number | np.bool_):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if abs(number) <= MAX_NUMBER:
            return number
    msg = f"{method} returned {what} {value!r:.80}; return a finite number of at most {MAX_NUMBER:g}"
    raise EnvironmentFaultError(msg)


def _metrics(metrics: Any, method: str) -> dict[str, float]:
    if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
        msg = f"{method} returned metrics {metrics!r:.80}; return a dict of at most {MAX_METRICS} numbers"
        raise EnvironmentFaultError(msg)
    if unknown := [name for name in metrics if not (isinstance(name, str) and _METRIC_NAME.fullmatch(name))]:
        msg = (
            f"{method} returned a metric {unknown[0]!r:.80}; its name has at most 48 characters, letters, digits and "
            "._/- only"
        )
        raise EnvironmentFaultError(msg)
    return {str(name): _number(value, method, f"metric {name!r:.40}") for name, value in metrics.items()}
