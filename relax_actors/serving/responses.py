"""OpenAI's `/v1/responses` for agents: input items, function tools, outputs, events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from relax_actors.data.answer_form import Form
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.serving.ask import Ask, Sampling, Undistorted, check_messages
from relax_actors.serving.completion import Completed, event
from relax_actors.serving.errors import ApiError
from relax_actors.serving.forms import offered_tools, schema_of
from relax_actors.serving.live import Delta
from relax_actors.sessions.dialogue import answer_message

_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesBody(Undistorted):
    """Body of `/v1/responses`."""

    model: str = Field("", max_length=256)
    input: str | list[dict[str, Any]] = ""
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = False
    previous_response_id: str | None = None
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def ask(self) -> Ask:
        """Return the request of a client; raises ApiError for unsupported settings and items."""
        if self.previous_response_id:
            msg = "previous_response_id is not supported: nothing is stored; send the whole conversation as `input`"
            raise ApiError(400, msg, "unsupported_parameter")
        given = (self.text or {}).get("format")
        schema = schema_of(given if isinstance(given, Mapping) else None, "text.format")
        once = self.parallel_tool_calls is False
        tools, form = offered_tools(
            [_tool(tool) for tool in self.tools or []], self.tool_choice, once=once, schema=schema
        )
        check_messages(self.input, "input")
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return Ask(
            messages=messages + messages_of(items),
            tools=tools,
            form=form,
            settings=self.chat_template_kwargs or {},
            sampling=Sampling(max_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p),
            one_call=once,
            stream=bool(self.stream),
            model=self.model,
        )


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return input items as chat messages, an answer with its calls as one; raises ApiError."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "message":
            message = {"role": item.get("role"), "content": _content(item.get("content"))}
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
                continue
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind == "function_call_output":
            output = item.get("output", "")
            content = output if isinstance(output, str) else _content(output)
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        else:
            name = str(kind)[:40]
            msg = f"input item of type {name!r} is not supported; send messages, function calls and their outputs"
            raise ApiError(400, msg, "unsupported_parameter")
        messages.append(message)
    return messages


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
        parts.append({"type": "text", "text": part.get("text")} if is_text else part)
    return parts


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        msg = f"tool of type {str(tool.get('type'))[:40]!r} is not supported; offer functions"
        raise ApiError(400, msg, "unsupported_parameter")
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(form: Form) -> str | dict[str, str]:
    if form.tool:
        return {"type": "function", "name": form.tool}
    return "required" if form.forces_call else "auto"


def _items(answer: Completed) -> list[dict[str, Any]]:
    message = answer_message(answer.parsed, answer.call)
    items: list[dict[str, Any]] = []
    if message["content"] is not None:
        items.append(_message_item(answer.call, [_text_part(message["content"])]))
    for n, call in enumerate(message.get("tool_calls", [])):
        one = {"id": f"fc_{answer.call}_{n}", "type": "function_call", "status": "completed", "call_id": call["id"]}
        items.append(one | call["function"])
    return items


class ResponseWriter:
    """Writes a response; implements `live.Writer`."""

    is_plain = False

    def __init__(self, ask: Ask, tokenizer: Tokenizer, model: str) -> None:
        del tokenizer
        self._ask, self._model = ask, model
        self._number, self._call, self._text = -1, "", ""

    def _head(self, call: str) -> dict[str, Any]:
        """Return what of a response is known before its answer."""
        ask = self._ask
        return {
            "id": f"resp_{call}",
            "object": "response",
            "created_at": int(time.time()),
            "incomplete_details": None,
            "model": ask.model or self._model,
            "error": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": not ask.one_call,
            "tool_choice": _choice(ask.form),
            "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in ask.tools],
            "temperature": ask.sampling.temperature,
            "top_p": ask.sampling.top_p,
        }

    def whole(self, answers: Sequence[Completed]) -> dict[str, Any]:
        """Return the body of a response."""
        one = answers[0]
        prompt, completion, cut = len(one.answer.prompt), len(one.answer.tokens), one.finish_reason == "length"
        return self._head(one.call) | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "system_fingerprint": one.fingerprint,
            "output": _items(one),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + completion,
            },
        }

    def _out(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def begin(self, call: str, prompt_length: int) -> bytes:
        """Return the first events, with the response as far as it is known."""
        del prompt_length
        self._call = call
        begun = self._head(call) | {"status": "in_progress", "output": [], "usage": None}
        return self._out("response.created", response=begun) + self._out("response.in_progress", response=begun)

    def delta(self, delta: Delta) -> bytes:
        """Return the events of new text; reasoning is left out, as in a response."""
        if not delta.content:
            return b""
        opened = b"" if self._text else self._open()
        self._text += delta.content
        return opened + self._out("response.output_text.delta", **self._at, delta=delta.content, logprobs=[])

    @property
    def _at(self) -> dict[str, Any]:
        return {"output_index": 0, "item_id": f"msg_{self._call}", "content_index": 0}

    def _open(self) -> bytes:
        item = _message_item(self._call, []) | {"status": "in_progress"}
        added = self._out("response.output_item.added", output_index=0, item=item)
        return added + self._out("response.content_part.added", **self._at, part=_text_part(""))

    def end(self, answers: Sequence[Completed]) -> bytes:
        """Return the events of the items, and the end of the response."""
        whole, events = self.whole(answers), []
        for index, item in enumerate(whole["output"]):
            if item["type"] == "message":
                (part,) = item["content"]
                if not self._text:
                    events.append(self._open())
                events.append(self._out("response.output_text.done", **self._at, text=part["text"], logprobs=[]))
                events.append(self._out("response.content_part.done", **self._at, part=part))
            else:
                at: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
                begun = item | {"status": "in_progress", "arguments": ""}
                events.append(self._out("response.output_item.added", output_index=index, item=begun))
                events.append(self._out("response.function_call_arguments.delta", **at, delta=item["arguments"]))
                done = {"name": item["name"], "arguments": item["arguments"]}
                events.append(self._out("response.function_call_arguments.done", **at, **done))
            events.append(self._out("response.output_item.done", output_index=index, item=item))
        kind = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
        return b"".join([*events, self._out(kind, response=whole)])

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return event(error.openai())


def _message_item(call: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{call}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
