"""What a request of a session continues: the tokens of an earlier answer, or nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages.generate import GenerateCall, Refusal
from relax_actors.messages.session_log import ROOT
from relax_actors.sessions.dialogue import Dialogue, Message, before_stop
from relax_actors.sessions.forest import Continuation, Forest
from relax_actors.sessions.service import Refused

_CHANGED = (
    "messages[{}] is not the answer that this session gave here; this run trains whole conversations alone: send it "
    "back as it was, or begin another one with other messages"
)


class Continuations:
    """Finds what requests continue.

    With `must_continue` it refuses a conversation of the session that does not continue its tokens, rather than begin a
    new branch. A conversation with another beginning starts a new branch in any case.
    """

    def __init__(self, dialogue: Dialogue, *, must_continue: bool) -> None:
        self._dialogue, self._must_continue = dialogue, must_continue

    def plan(self, forest: Forest, call: GenerateCall, keys: Sequence[str]) -> Continuation:
        """Return what a request continues; rendering a template takes milliseconds.

        Args:
            forest: turns of the session.
            call: the request.
            keys: of the conversation after each of its messages.

        Raises:
            RowError, ConfigError: the template refuses the messages.
            Refused: the conversation does not continue the tokens of the session, and must.
        """
        parent, covered = forest.continued(keys)
        new = call.messages[covered:]
        if self._must_continue:
            _check_continues(forest, call.messages, covered)
        if parent != ROOT:
            history = call.messages[: covered - 1]
            answer = forest.turns[parent].tokens
            extension = self._dialogue.extension(history, answer, new, call.tools, call.settings)
            if extension.is_faithful:
                return Continuation(parent, extension.token_ids, new)
            if self._must_continue:
                detail = (
                    f"the chat template does not continue the tokens of the session: {extension.change}, "
                    "and this run trains whole conversations alone; leave out what the template drops"
                )
                raise Refused(Refusal.INVALID, detail)
        prompt = self._dialogue.prompt(call.messages, call.tools, call.settings)
        return Continuation(ROOT, prompt, call.messages)


def _check_continues(forest: Forest, messages: Sequence[dict[str, Any]], covered: int) -> None:
    """Check that the client sent back the answers it received.

    `covered` messages at the beginning of the conversation are those whose tokens it continues.

    Raises:
        Refused: an answer was changed or left out, or the tools or the settings of the template have changed.
    """
    given = [canonical(message) for message in messages]
    for leaf in forest.leaves():
        known = [canonical(message) for message in forest.conversation(leaf)]
        at = -1
        for number in forest.path(leaf):
            at += len(forest.turns[number].messages)
            if not covered <= at < len(given) or given[:at] != known[:at]:
                continue
            if given[at] == known[at]:
                detail = (
                    f"messages[{at}] was given to a conversation with other tools or chat_template_kwargs "
                    "in this session; send the same ones with each request of a conversation"
                )
                raise Refused(Refusal.INVALID, detail)
            raise Refused(Refusal.INVALID, _CHANGED.format(at))
    for number, message in enumerate(messages[covered:] if covered else (), covered):
        if message.get("role") == "assistant":
            raise Refused(Refusal.INVALID, _CHANGED.format(number))


PROMPT = "prompt"
"""Role of a message that is a prompt, or what a prompt appends to an earlier answer."""


class Prompts:
    """Finds what prompts continue."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue, self._tokenizer = dialogue, dialogue.tokenizer

    def plan(self, forest: Forest, call: GenerateCall) -> Continuation:
        """Return what a prompt continues: the longest earlier turn that it starts with.

        Raises:
            RowError: the text cannot be tokenized.
        """
        ends = {
            number: self._text_end(forest, number, call.text) if call.text else _token_end(forest, number, call.tokens)
            for number, turn in enumerate(forest.turns)
            if turn.player == call.player
        }
        at, parent = max(((end, number) for number, end in ends.items() if end), default=(0, ROOT))
        if not call.text:
            observed = call.tokens[at:]
            return Continuation(parent, observed, [_prompt(self._tokenizer.spell(observed))])
        text, is_first = call.text[at:], parent == ROOT
        observed = self._tokenizer.encode_any(text, special=is_first) if text else np.zeros(0, np.int32)
        return Continuation(parent, observed, [_prompt(text)])

    def answer(self, tokens: NDArray[Any], stop: list[str]) -> Message:
        """Return an answer as a message: its text is that which the client gets."""
        text = before_stop(self._tokenizer.decode(tokens), *self._dialogue.stop_of(tokens, stop))
        return {"role": "assistant", "content": text}

    def _text_end(self, forest: Forest, number: int, text: str) -> int:
        """Return where the text up to a turn ends in a prompt; 0 if the prompt differs.

        The stop string that ended an answer may stand in the prompt or not: the policy has read it in both cases.
        """
        at = 0
        for turn in (forest.turns[n] for n in forest.path(number)):
            if turn.state:  # of a conversation
                return 0
            prompt, answer = turn.messages
            said = (self._tokenizer.decode(turn.tokens), answer["content"])
            whole = next((t for one in said if one and text.startswith(t := prompt["content"] + one, at)), "")
            if not whole:
                return 0
            at += len(whole)
        return at


def _prompt(text: str) -> Message:
    return {"role": PROMPT, "content": text}


def _token_end(forest: Forest, number: int, tokens: NDArray[Any]) -> int:
    known = forest.tokens(number)
    return len(known) if np.array_equal(tokens[: len(known)], known) else 0


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
