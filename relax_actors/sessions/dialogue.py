"""Conversations as tokens, and answers as messages, for one model."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.answer_form import Thinking
from relax_actors.data.media_fields import PART_TYPES
from relax_actors.data.renderer import Extension, Renderer
from relax_actors.data.tokenizer import TemplateError, Tokenizer
from relax_actors.data.tool_call import ParsedAnswer, ToolFormat, call_ids, format_of
from relax_actors.data.tool_calls import parse_answer
from relax_actors.errors import RowError

Message = dict[str, Any]
_ROLES = {"developer": "system", "function": "tool"}
"""Roles of clients, by the name that templates know."""
THINK_TOKENS = 16
"""Tokens at the end of a prompt that are searched for the tag that opens reasoning."""
RESERVED = frozenset(
    [
        "add_generation_prompt",
        "asks",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    ]
)
"""Names that are no variables of a chat template but arguments of the functions that run it."""


class Dialogue:
    """The chat template of a model, and the format of its tool calls.

    Messages may show media of the kinds `kinds`: those of the model, where someone prepares them.
    """

    def __init__(self, tokenizer: Tokenizer, kinds: Collection[str] = ()) -> None:
        self.tokenizer, self._kinds = tokenizer, frozenset(kinds)
        self.tool_format = format_of(tokenizer.chat_template)
        if tokenizer.chat_template:
            tokenizer.formatter  # noqa: B018 loads transformers now, which takes longer than a request may
        self._renderer = lru_cache(maxsize=32)(self._make_renderer)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Message], settings: Mapping[str, Any], *, asks: bool = True
    ) -> NDArray[np.int32]:
        """Return the tokens of a conversation, `[len] int32`; raises RowError."""
        if not self.tokenizer.chat_template:
            msg = "the model has no chat template; use /v1/completions, or add chat_template.jinja to the model folder"
            raise RowError(msg)
        if tools and self.tool_format is None:
            msg = "the chat template of the model knows no tools; leave `tools` out, or describe them in a message"
            raise RowError(msg)
        if taken := RESERVED.intersection(settings):
            msg = f"chat_template_kwargs may not set {min(taken)!r}; give variables of the chat template alone"
            raise RowError(msg)
        with _refusals():
            text = self.tokenizer.chat(
                [for_template(message, self._kinds) for message in messages],
                asks=asks,
                tools=list(tools) or None,
                **settings,
            )
        return self.tokenizer.encode_any(text, special=False)

    def extension(
        self,
        history: Sequence[Message],
        answer: NDArray[Any],
        new: Sequence[Message],
        tools: Sequence[Message],
        settings: Mapping[str, Any],
    ) -> Extension:
        """Return the tokens of messages behind a sampled answer, and whether they continue it.

        `history` are the messages before the answer `[len] int32`, and `new` those behind it.

        Raises:
            RowError: the template refuses the messages.
            ConfigError: the template cannot be extended turn by turn.
        """
        with _refusals():
            renderer = self._renderer(json.dumps(list(tools)), json.dumps(dict(settings), sort_keys=True))
            before, behind = ([for_template(message, self._kinds) for message in part] for part in (history, new))
            return renderer.extend(before, answer, behind)

    def _make_renderer(self, tools: str, settings: str) -> Renderer:
        return Renderer(self.tokenizer, json.loads(tools), json.loads(settings))

    def parse(
        self, prompt: NDArray[Any], tokens: NDArray[Any], tools: Sequence[Message], stop: Sequence[str] = ()
    ) -> ParsedAnswer:
        """Take an answer apart; its calls stay text if no tools were offered.

        The tokens of `prompt` may open its reasoning. The client does not see the stop string of `stop` that ended the
        answer.
        """
        thinks, text, tool_format = self.thinks(prompt), self.text(tokens, tools), self.format_for(tools)
        whole = parse_answer(text, tool_format, tools, thinks=thinks)
        ended, behind = self.stop_of(tokens, stop)
        if not ended:
            return whole
        cut = parse_answer(before_stop(text, ended, behind), tool_format, tools, thinks=thinks)
        # A stop string such as `</tool_call>` is part of a call: the client gets the call.
        return replace(whole if len(whole.calls) > len(cut.calls) else cut, stop=ended)

    def stop_of(self, tokens: NDArray[Any], stop: Sequence[str]) -> tuple[str, str]:
        """Return the stop string that ended an answer, and the text behind it; empty if none did.

        It ends in the last token. An earlier one has ended nothing, because of `rollout.min_tokens`.
        """
        ids, token_bytes = tokens.tolist(), self.tokenizer.token_bytes
        if not stop or not ids or ids[-1] in self.tokenizer.stop_ids:
            return "", ""
        text, before = b"".join(map(token_bytes, ids)), sum(len(token_bytes(token)) for token in ids[:-1])
        places = []
        for string in stop:
            data = string.encode()
            if (start := text.find(data, max(0, before - len(data) + 1))) >= 0:
                places.append((start + len(data), start, string))
        if not places:
            return "", ""
        end, _, string = min(places)
        return string, text[end:].decode(errors="replace")

    def format_for(self, tools: Sequence[Message]) -> ToolFormat | None:
        """Return the format of the calls in an answer; None if there are none."""
        return self.tool_format if tools else None

    def text(self, tokens: NDArray[Any], tools: Sequence[Message]) -> str:
        """Return the text of an answer that `parse_answer` reads.

        Special tokens mark the calls of some families, so they are text only where there may be calls.
        """
        return self.tokenizer.decode(tokens) if self.format_for(tools) is None else self.tokenizer.spell(tokens)

    def thinks(self, prompt: NDArray[Any]) -> bool:
        """Whether a prompt ends with the tag that opens the reasoning."""
        return self.thinking(prompt) is Thinking.OPENED

    def thinking(self, prompt: NDArray[Any]) -> Thinking:
        """How the reasoning of the answer to a prompt begins."""
        end = self.tokenizer.spell(prompt[-THINK_TOKENS:]).rstrip()
        if end.endswith("<think>"):
            return Thinking.OPENED
        is_over = "<think>" not in self.tokenizer.chat_template or end.endswith("</think>")
        return Thinking.NONE if is_over else Thinking.POSSIBLE


def before_stop(text: str, stop: str, behind: str) -> str:
    """Return a text up to the stop string that ended it; see `Dialogue.stop_of`."""
    if not stop or text.endswith(stop + behind):
        return text.removesuffix(stop + behind)
    # The decoder leaves special tokens out.
    return text.rpartition(stop)[0] if stop in text else text


def answer_message(parsed: ParsedAnswer, call: str) -> Message:
    """Return an answer as a chat message, as clients get it and send it back.

    A malformed tool call stays in the content, where the agent and the model see it. The ids of tool calls follow from
    `call`, the id of the request.
    """
    texts = [parsed.content, *(bad.text.strip() for bad in parsed.malformed)]
    content = "\n".join(text for text in texts if text)
    message: Message = {"role": "assistant", "content": content or (None if parsed.calls else "")}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": name,
                "type": "function",
                "function": {"name": tool.name, "arguments": json.dumps(tool.arguments, ensure_ascii=False)},
            }
            for name, tool in zip(call_ids(parsed.calls, call), parsed.calls, strict=True)
        ]
    return message


@contextmanager
def _refusals() -> Iterator[None]:
    """Report a template's refusal without paths and settings of the run."""
    try:
        yield
    except TemplateError as error:
        msg = f"the chat template of the model refuses the messages: {error.reason}; correct them"
        raise RowError(msg) from error


def for_template(message: Message, kinds: Collection[str] = ()) -> Message:
    """Return a message as chat templates read it: text as one string, arguments as objects.

    Media of `kinds`, in any spelling of `PART_TYPES`, become `{"type": <kind>}`.

    Raises:
        RowError: it holds something that the model cannot read.
    """
    role = message.get("role")
    if not isinstance(role, str):
        msg = f"a message has role {role!r}; write system, user, assistant or tool"
        raise RowError(msg)
    plain = {key: value for key, value in message.items() if value is not None}
    plain["role"] = _ROLES.get(role, role)
    plain["content"] = _content(message.get("content"), kinds)
    if isinstance(calls := message.get("tool_calls"), list):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _content(content: Any, kinds: Collection[str]) -> str | list[Message]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        msg = f"the content of a message is a {type(content).__name__}, not a text or a list of parts"
        raise RowError(msg)
    parts = list[Message]()
    for part in content:
        name = str(part.get("type") if isinstance(part, Mapping) else type(part).__name__)
        kind = PART_TYPES.get(name)
        if name == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in kinds:
            parts.append({"type": kind})
        else:
            taken = ", ".join(("text", *sorted(kinds))) if kinds else "text alone"
            msg = f"a message has a part of type {name[:40]!r}; the model of this run takes {taken}"
            raise RowError(msg)
    has_media = any(part["type"] != "text" for part in parts)
    return parts if has_media else "".join(part["text"] for part in parts)


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        msg = "a tool call of a message has no function with a name"
        raise RowError(msg)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            msg = f"the arguments of tool call {function['name'][:80]!r} are no JSON: {error}"
            raise RowError(msg) from error
    return {**call, "function": {**function, "arguments": arguments}}
