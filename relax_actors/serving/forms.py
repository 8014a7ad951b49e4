"""Form of an answer in each API, and its grammar, compiled before it reaches the engine.

A schema may be hostile. Its grammar is compiled in a thread of its own, one at a time, with llguidance's limits on
work, and is refused if that takes more than `COMPILE_SECONDS` of the thread's CPU time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

from relax_actors.data.answer_form import Form, grammar_of
from relax_actors.data.grammar import GrammarError, Grammars
from relax_actors.messages.generate import MAX_GRAMMAR, Refusal
from relax_actors.serving.errors import ApiError, refused
from relax_actors.sessions.dialogue import Dialogue

COMPILE_SECONDS = 1.0
WAIT_SECONDS = 10.0
"""Time to compile a grammar, and those that were asked for before."""
IN_SESSION = (
    "a session takes no response_format and no forced tool call: its answers are trained with log-probs over the whole "
    "vocabulary, and no off-policy correction knows which tokens a grammar forbade; leave them out, or send the "
    "request outside of the session"
)
Tools = list[dict[str, Any]]


def schema_of(given: Mapping[str, Any] | None, place: str) -> Mapping[str, Any] | None:
    """Return the JSON schema of a response format; None for text.

    `given` is `response_format` of chat completions, `text.format` of responses, or `output_config.format` of messages;
    `place` names it.

    Raises:
        ApiError: it is none of these.
    """
    kind = (given or {}).get("type", "text")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner = given.get("json_schema", given)
    schema = inner.get("schema", {"type": "object"}) if isinstance(inner, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        msg = f"{place} is not supported; use text, json_object, or json_schema with a schema that is an object"
        raise ApiError(400, msg, "unsupported_parameter")
    return schema


def offered_tools(
    tools: Tools, choice: Any, *, once: bool = False, schema: Mapping[str, Any] | None = None
) -> tuple[Tools, Form]:
    """Return the tools that the model reads, and the form of its answer.

    Tools are as in OpenAI's chat completions; `choice` is none, auto, required, or an object that names a tool. With
    `once`, a forced call is the only one. `schema` is that of the content; None for any text.

    Raises:
        ApiError: a tool is no function, or the choice cannot be met.
    """
    if choice == "none":
        return [], Form(schema)
    is_free = choice is None or choice == "auto"
    for tool in tools:
        function = tool.get("function")
        named = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(named, str):
            msg = 'a tool is not {"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise ApiError(400, msg, "invalid_request")
    if is_free:
        return tools, Form(schema)
    name = "" if choice == "required" else _named(choice)
    if not any(name in ("", tool["function"]["name"]) for tool in tools):
        msg = f"tool_choice demands a call of {repr(name[:80]) if name else 'a tool'}, which `tools` lacks; offer it"
        raise ApiError(400, msg, "invalid_request")
    return tools, Form(schema, forces_call=True, tool=name, calls_once=once)


def _named(choice: Any) -> str:
    """Return the name of the tool in a choice of chat completions, of responses, or of messages."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind in ("function", "tool"):
        inner = choice.get("function", choice)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if isinstance(name, str) and name:
            return name
    shown = choice if isinstance(choice, str) else kind
    msg = f"tool_choice {str(shown)[:80]!r} is not supported; use none, auto, required, or the name of one function"
    raise ApiError(400, msg, "unsupported_parameter")


class FormGrammars:
    """Makes the grammars of forms. For one event loop."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue, self._grammars = dialogue, Grammars(dialogue.tokenizer)
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._refusal = lru_cache(maxsize=256)(self._compile)

    async def grammar(self, form: Form, tools: Tools, prompt: NDArray[Any]) -> str:
        """Return the grammar of an answer to a prompt.

        Raises:
            ApiError: it is too large, takes too long to compile, or has no answer.
            RowError: the form has no grammar for this model; ConfigError: the gateway cannot compile grammars.
        """
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._make, form, tools, prompt)
        try:
            return await asyncio.wait_for(work, WAIT_SECONDS)
        except TimeoutError as error:
            msg = f"the schema was not compiled within {WAIT_SECONDS:g} s, as others came before it; try again"
            raise refused(Refusal.BUSY, msg) from error

    def _make(self, form: Form, tools: Tools, prompt: NDArray[Any]) -> str:
        dialogue = self._dialogue
        text = grammar_of(form, tools, dialogue.tokenizer, dialogue.tool_format, dialogue.thinking(prompt))
        if len(text) > MAX_GRAMMAR:
            msg = f"the schemas have {len(text)} characters as a grammar, more than {MAX_GRAMMAR}; shorten them"
            raise ApiError(400, msg, "invalid_request")
        self._grammars.vocabulary  # noqa: B018 read now, so that the time to compile is that of the schema
        if refusal := self._refusal(text):
            raise ApiError(400, f"the schema of the answer cannot be used: {refusal}; simplify it", "invalid_request")
        return text

    def _compile(self, grammar: str) -> str:
        """Compile a grammar; return why it cannot be used, empty if it can."""
        start = time.thread_time()
        try:
            self._grammars.begin(grammar)
        except GrammarError as error:
            return str(error)
        seconds = time.thread_time() - start
        return (
            f"it took {seconds:.1f} s to compile, more than {COMPILE_SECONDS:g} s" if seconds > COMPILE_SECONDS else ""
        )
