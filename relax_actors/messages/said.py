"""Chat messages as people read them."""

from __future__ import annotations

from typing import Any


def said(messages: object) -> list[tuple[str, str]]:
    """Return chat messages as (role, text); what is no message is left out."""
    given = messages if isinstance(messages, list) else []
    return [(str(m.get("role", "")), _content(m)) for m in given if isinstance(m, dict)]


def _content(message: dict[str, Any]) -> str:
    """Return a message's text, with media as `[kind]` and calls of tools in full."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [_part(part) for part in parts if part]
    given = message.get("tool_calls")
    calls = given if isinstance(given, list) else []
    texts += [f"[call {call.get('function', call)}]" for call in calls if isinstance(call, dict)]
    return "".join(texts)


def _part(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    return str(part["text"]) if part.get("type") == "text" and "text" in part else f"[{part.get('type')}]"
