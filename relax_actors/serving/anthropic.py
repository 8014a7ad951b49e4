"""Anthropic's `/v1/messages`, as far as agents use it: content blocks, tools, stream events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.serving.ask import Ask, Sampling, Undistorted, check_messages, stops
from relax_actors.serving.completion import Completed, event
from relax_actors.serving.errors import ApiError
from relax_actors.serving.forms import offered_tools, schema_of
from relax_actors.serving.live import Delta
from relax_actors.sessions.dialogue import answer_message

_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_REASONS = {"tool_calls": "tool_use", "stop": "end_turn", "length": "max_tokens"}


class MessagesBody(Undistorted):
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
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    stream: bool | None = False

    def ask(self) -> Ask:
        """Return what the client asks for; raises ApiError if a block or a setting is not supported."""
        choice = self.tool_choice or {"type": "auto"}
        once = bool(choice.get("disable_parallel_tool_use"))
        given = (self.output_config or {}).get("format")
        schema = schema_of(given if isinstance(given, Mapping) else None, "output_config.format")
        kind = str(choice.get("type"))
        tools, form = offered_tools(
            [_tool(tool) for tool in self.tools or []],
            choice if kind == "tool" else _CHOICES.get(kind, kind),
            once=once,
            schema=schema,
        )
        check_messages(self.messages)
        messages = [{"role": "system", "content": _text(self.system)}] if self.system else []
        for message in self.messages:
            messages += messages_of(message)
        return Ask(
            messages=messages,
            tools=tools,
            form=form,
            settings={} if self.thinking is None else {"enable_thinking": self.thinking.get("type") != "disabled"},
            sampling=Sampling(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                stop=stops(self.stop_sequences),
            ),
            one_call=once,
            stream=bool(self.stream),
            model=self.model,
        )


def messages_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a message as chat messages, tool results first; raises ApiError for other blocks."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    results: list[dict[str, Any]] = []
    shown, calls = [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind in ("text", "image"):
            shown.append(block)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}), ensure_ascii=False)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = _content(block.get("content", ""))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind not in ("thinking", "redacted_thinking"):
            msg = f"content block of type {str(kind)[:40]!r} is none of text, image, tool_use and tool_result"
            raise ApiError(400, msg, "unsupported_parameter")
    said: dict[str, Any] = {"role": role, "content": _content(shown)}
    if calls:
        said["tool_calls"] = calls
    return results + ([said] if shown or calls or not results else [])


def _text(content: Any) -> str:
    text = _content(content)
    if not isinstance(text, str):
        msg = "a system prompt must be text; send images in the messages of the user"
        raise ApiError(400, msg, "unsupported_parameter")
    return text


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Return blocks as the content of a chat message: text alone as one string."""
    if isinstance(content, str) or content is None:
        return content or ""
    blocks = content if isinstance(content, list) else [content]
    parts = [_part(block) for block in blocks]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(block: Any) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    if kind == "text":
        return {"type": "text", "text": str(block.get("text", ""))}
    source = block.get("source") if kind == "image" else None
    if not isinstance(source, Mapping) or source.get("type") not in ("base64", "url"):
        msg = f"a block of type {str(kind)[:40]!r} is neither text nor an image with a base64 or url source"
        raise ApiError(400, msg, "unsupported_parameter")
    data = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": data if source["type"] == "base64" else str(source.get("url"))}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        msg = f"tool of type {str(tool.get('type'))[:40]!r} is not supported; offer tools with an input_schema"
        raise ApiError(400, msg, "unsupported_parameter")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema", {})}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


class MessageWriter:
    """Writes a message; implements `live.Writer`."""

    is_plain = False

    def __init__(self, ask: Ask, tokenizer: Tokenizer, model: str) -> None:
        del tokenizer
        self._ask, self._model = ask, model
        self._blocks = 0
        self._is_open = False

    def _head(self, call: str) -> dict[str, Any]:
        """Return what of a message is known before its answer."""
        return {"id": f"msg_{call}", "type": "message", "role": "assistant", "model": self._ask.model or self._model}

    def whole(self, answers: Sequence[Completed]) -> dict[str, Any]:
        """Return the body of a message."""
        one = answers[0]
        message, stop = answer_message(one.parsed, one.call), None if one.parsed.calls else one.parsed.stop or None
        blocks: list[dict[str, Any]] = []
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", []):
            function = call["function"]
            arguments = json.loads(function["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        return self._head(one.call) | {
            "system_fingerprint": one.fingerprint,
            "content": blocks,
            "stop_reason": "stop_sequence" if stop else _REASONS[one.finish_reason],
            "stop_sequence": stop,
            "usage": {"input_tokens": len(one.answer.prompt), "output_tokens": len(one.answer.tokens)},
        }

    def begin(self, call: str, prompt_length: int) -> bytes:
        """Return the first event, with the message as far as it is known."""
        usage = {"input_tokens": prompt_length, "output_tokens": 0}
        message = self._head(call) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _out("message_start", message=message)

    def delta(self, delta: Delta) -> bytes:
        """Return the events of new text; reasoning is left out, as in a message."""
        if not delta.content:
            return b""
        opened = b""
        if not self._is_open:
            opened = _out("content_block_start", index=self._blocks, content_block={"type": "text", "text": ""})
            self._is_open = True
        text = {"type": "text_delta", "text": delta.content}
        return opened + _out("content_block_delta", index=self._blocks, delta=text)

    def _close(self) -> bytes:
        closed = _out("content_block_stop", index=self._blocks)
        self._blocks += 1
        return closed

    def end(self, answers: Sequence[Completed]) -> bytes:
        """Return the events of tool calls, and the end of the message."""
        whole = self.whole(answers)
        events = [self._close()] if self._is_open else []
        for block in whole["content"]:
            if block["type"] == "text":
                continue
            text = json.dumps(block["input"], ensure_ascii=False)
            events.append(_out("content_block_start", index=self._blocks, content_block=block | {"input": {}}))
            partial = {"type": "input_json_delta", "partial_json": text}
            events += [_out("content_block_delta", index=self._blocks, delta=partial), self._close()]
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        events.append(_out("message_delta", delta=ended, usage={"output_tokens": whole["usage"]["output_tokens"]}))
        return b"".join([*events, _out("message_stop")])

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return event(error.anthropic(), "error")


def _out(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
