"""Keys of conversations: equal for messages that mean the same, however a client's SDK spells them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_ANSWER_FIELDS = ("name", "tool_call_id")


def conversation_keys(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    settings: Mapping[str, Any] | None = None,
    player: str = "",
) -> list[str]:
    """Return the key of every beginning of a conversation, from no message to all of them.

    Two conversations with equal keys are the same to the model. The keys of a conversation with other tools or template
    settings differ from the beginning, because the template writes them first. Those of two players differ always.
    """
    keys = [_digest(player, {"tools": list(tools), "settings": dict(settings or {})})]
    for message in messages:
        keys.append(_digest(keys[-1], canonical(message)))
    return keys


def prompt_key(prompt: Sequence[int] | str, player: str = "") -> str:
    """Return the key of a prompt that is no conversation, as tokens or text."""
    return _digest(player, {"prompt": prompt})


def canonical(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the one form that keys are made of.

    Reasoning is left out: most clients do not send it back.
    """
    form: dict[str, Any] = {"role": message.get("role"), "content": _content(message.get("content"))}
    form |= {name: message[name] for name in _ANSWER_FIELDS if message.get(name) is not None}
    if calls := message.get("tool_calls"):
        form["tool_calls"] = [_call(call) for call in calls]
    return form


def _content(content: Any) -> Any:
    """Join parts of text; an absent content is an empty one."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return content


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {"id": call.get("id"), "name": function.get("name"), "arguments": arguments}


def _digest(before: str, value: Any) -> str:
    text = json.dumps(_integral(value), sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()[:32]


def _integral(value: Any) -> Any:
    """Turn whole floats into integers: JavaScript does not tell 1.0 from 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _integral(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_integral(inner) for inner in value]
    return value
