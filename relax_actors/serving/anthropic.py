"""Anthropic's `/v1/messages`, as far as agents use it: content blocks, tools, stream events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from relax_actors.serving.ask import Ask, Lenient, Sampling, offered_tools, stops
from relax_actors.serving.completion import Completed, event
from relax_actors.serving.dialogue import answer_message
from relax_actors.serving.errors import ApiError

_CHOICES = {"auto": "auto", "none": "none"}
_REASONS = {"tool_calls": "tool_use", "stop": "end_turn", "length": "max_tokens"}


class MessagesBody(Lenient):
    """Body of `/v1/messages` and `/v1/messages/count_tokens`."""

    model: str = Field("", max_length=256)
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = False

    def ask(self) -> Ask:
        """Return what the client asks for.

        Raises:
            ApiError: a block or a setting is not supported.
        """
        messages = [{"role": "system", "content": _text(self.system)}] if self.system else []
        for message in self.messages:
            messages += messages_of(message)
        kind = (self.tool_choice or {}).get("type", "auto")
        return Ask(
            messages=messages,
            tools=offered_tools([_tool(tool) for tool in self.tools or []], _CHOICES.get(kind, kind)),
            sampling=Sampling(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                stop=stops(self.stop_sequences),
            ),
            stream=bool(self.stream),
            model=self.model,
        )


def messages_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a message as chat messages: its results of tools first, each as one, then its text and calls.

    Raises:
        ApiError: a block is of another type, or malformed.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    results: list[dict[str, Any]] = []
    texts, calls = [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(str(block.get("text", "")))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}), ensure_ascii=False)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = _text(block.get("content", ""))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind not in ("thinking", "redacted_thinking"):
            msg = f"content block of type {str(kind)[:40]!r} is not supported; send text, tool_use and tool_result"
            raise ApiError(400, msg, "unsupported_parameter")
    found: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        found["tool_calls"] = calls
    return results + ([found] if texts or calls or not results else [])


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    blocks = content if isinstance(content, list) else [content]
    for block in blocks:
        if not isinstance(block, Mapping) or block.get("type") != "text":
            msg = "system prompts and results of tools must be text; the gateway takes text alone"
            raise ApiError(400, msg, "unsupported_parameter")
    return "".join(str(block.get("text", "")) for block in blocks)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        msg = f"tool of type {str(tool.get('type'))[:40]!r} is not supported; offer tools with an input_schema"
        raise ApiError(400, msg, "unsupported_parameter")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema", {})}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def message_response(ask: Ask, found: Completed, model: str) -> dict[str, Any]:
    """Return the body of a message."""
    message = answer_message(found.parsed, found.call)
    blocks: list[dict[str, Any]] = []
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", []):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return {
        "id": f"msg_{found.call}",
        "type": "message",
        "role": "assistant",
        "model": ask.model or model,
        "system_fingerprint": found.fingerprint,
        "content": blocks,
        "stop_reason": _REASONS[found.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": len(found.answer.prompt), "output_tokens": len(found.answer.tokens)},
    }


def message_events(ask: Ask, found: Completed, model: str) -> Iterator[bytes]:
    """Yield the events of a message as a stream."""
    whole = message_response(ask, found, model)

    def out(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    usage = whole["usage"] | {"output_tokens": 0}
    yield out("message_start", message=whole | {"content": [], "stop_reason": None, "usage": usage})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            begun, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            text = json.dumps(block["input"], ensure_ascii=False)
            begun, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": text}
        yield out("content_block_start", index=index, content_block=begun)
        yield out("content_block_delta", index=index, delta=delta)
        yield out("content_block_stop", index=index)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield out("message_delta", delta=ended, usage={"output_tokens": whole["usage"]["output_tokens"]})
    yield out("message_stop")
