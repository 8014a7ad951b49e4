"""ATIF: agents' trajectories as steps with token ids and log-probs of calls.

Every agent step has the whole prompt of its call, so that each turn can be read alone. What ATIF has no fields for is
in `extra.relax_actors`; a file without it is read by the steps alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from relax_actors.messages.said import said
from relax_actors.traces import fields
from relax_actors.traces.exact_json import decoded
from relax_actors.traces.facts import KEY, facts_of, trace_with
from relax_actors.traces.head import Head, head_of
from relax_actors.traces.layout import LAYOUT, laid_out, turns_and_layout
from relax_actors.traces.model import Trace, TraceError
from relax_actors.traces.turns import Turn, sequences_of

VERSION = "ATIF-v1.8"
PREFIX = "ATIF-v1."
"""Begin of the versions that are read."""
SOURCES = {"system": "system", "user": "user", "agent": "assistant"}
"""Sources of steps, and the roles of chat messages."""


def record_of(trace: Trace) -> dict[str, Any]:
    """Return a trace as an ATIF trajectory."""
    flat, layout = turns_and_layout(trace)
    agent: dict[str, Any] = {"name": trace.run or "relax-actors", "version": version("relax-actors")}
    if trace.tools:
        agent["tool_definitions"] = trace.tools
    steps = list(_steps(trace, flat))
    return {
        "schema_version": VERSION,
        "session_id": "/".join(filter(None, (trace.run, trace.row, str(trace.sample)))),
        "agent": agent,
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {
            "total_prompt_tokens": sum(len(turn.context) for turn in flat),
            "total_completion_tokens": sum(len(turn.tokens) for turn in flat),
            "total_steps": len(steps),
        },
        "extra": {KEY: {**facts_of(trace), LAYOUT: layout}},
    }


def _steps(trace: Trace, turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    """Yield a trace's steps: messages in order, answers with their turn's tokens."""
    chat = trace.messages or trace.prompt_messages or [{"role": "user", "content": trace.prompt}]
    answers = sum(message.get("role") == "assistant" for message in chat)
    by_message = trace.messages and answers == len(turns)
    left = iter(turns)
    for message in chat:
        role = str(message.get("role", ""))
        (_, text), *_ = [*said([message]), ("", "")]
        if role != "assistant":
            yield {"source": role if role in ("system", "user") else "system", "message": text}
        elif by_message:
            yield _agent_step(next(left), text, message.get("tool_calls"))
        elif not trace.messages:
            yield {"source": "agent", "message": text, "llm_call_count": 0}
    if not by_message:
        for turn in turns:
            yield _agent_step(turn, trace.text if len(turns) == 1 else "", None)


def _agent_step(turn: Turn, text: str, calls: object) -> dict[str, Any]:
    step: dict[str, Any] = {
        "source": "agent",
        "message": text,
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": len(turn.context),
            "completion_tokens": len(turn.tokens),
            "prompt_token_ids": turn.context.tolist(),
            "completion_token_ids": turn.tokens.tolist(),
            "logprobs": turn.logprobs.astype(np.float64).tolist(),
        },
    }
    listed = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    if listed:
        step["tool_calls"] = [_call(call, number) for number, call in enumerate(listed)]
    return step


def _call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = call.get("function")
    own = function if isinstance(function, dict) else {}
    given = own.get("arguments", {})
    arguments: Any = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given)
        except ValueError:
            arguments = {"text": given}
    return {
        "tool_call_id": str(call.get("id", number)),
        "function_name": str(own.get("name", "")),
        "arguments": arguments if isinstance(arguments, dict) else {"value": arguments},
    }


def trace_of(record: Mapping[str, Any], origin: str) -> Trace:
    """Return the trace of an ATIF trajectory.

    Raises:
        TraceError: a step of the agent has no token ids or log-probs, or is trained twice; a step has media; or the
            file is malformed.
    """
    steps = fields.objects(record, "steps", origin)
    turns = [turn for step in steps if (turn := _turn(step, origin)) is not None]
    extra = record.get("extra")
    extra = extra if isinstance(extra, dict) else {}
    if isinstance(facts := decoded(extra.get(KEY)), dict):
        return trace_with(facts, laid_out(facts.get(LAYOUT), turns, origin), origin)
    if not turns:
        msg = f"{origin}: no step of the agent has token ids; record them in its metrics"
        raise TraceError(msg)
    for step in steps:
        _check_media(step, f"{origin}, step {step.get('step_id')}")
    texts = [(SOURCES.get(str(step.get("source")), "system"), _text(step)) for step in steps]
    chat = [{"role": role, "content": text} for role, text in texts]
    first = next(i for i, (role, _) in enumerate(texts) if role == "assistant")
    agent = record.get("agent")
    return Trace(
        run=str(agent.get("name", "")) if isinstance(agent, dict) else "",
        prompt_tokens=turns[0].context,
        sequences=sequences_of(turns),
        text="".join(_text(step) for step in steps if _is_answer(step)),
        reward=fields.number(extra.get("reward"), "extra.reward", origin),
        prompt="\n".join(text for _, text in texts[:first]),
        prompt_messages=chat[:first],
        messages=chat if len(turns) > 1 else [],
        origin=origin,
    )


def head(record: Mapping[str, Any]) -> Head:
    """Return the head of an ATIF trajectory."""
    extra = given if isinstance(given := record.get("extra"), dict) else {}
    if isinstance(facts := extra.get(KEY), dict):
        return head_of(facts, facts.get("prompt_token_ids"))
    steps = record.get("steps")
    first = next((s for s in steps if isinstance(s, dict) and _is_answer(s)), {}) if isinstance(steps, list) else {}
    metrics = first.get("metrics")
    prompt = metrics.get("prompt_token_ids") if isinstance(metrics, dict) else None
    return head_of({"reward": extra.get("reward")}, prompt)


def _check_media(step: Mapping[str, Any], where: str) -> None:
    """Raise TraceError if the message of a step, or what it observed, has media."""
    seen = step.get("observation")
    results = seen.get("results") if isinstance(seen, dict) else None
    for message in ({"content": step.get("message")}, *(results if isinstance(results, list) else ())):
        fields.check_text(message, where)


def _text(step: Mapping[str, Any]) -> str:
    message = step.get("message")
    return message if isinstance(message, str) else "".join(text for _, text in said([{"content": message}]))


def _is_answer(step: Mapping[str, Any]) -> bool:
    """Whether a step is an answer of the model that was not copied from elsewhere."""
    return step.get("source") == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0


def _turn(step: Mapping[str, Any], origin: str) -> Turn | None:
    """Return a step's turn; None without a call of the model, or if it is a copy."""
    if not _is_answer(step):
        return None
    where = f"{origin}, step {step.get('step_id')}"
    calls = step.get("llm_call_count", 1)
    if calls not in (1, None):
        msg = f"{where}: tokens of {calls!r:.20} calls of the model cannot be told apart; write one step for each call"
        raise TraceError(msg)
    metrics = step.get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    context, tokens = (fields.token_ids(metrics, f"{name}_token_ids", where) for name in ("prompt", "completion"))
    return Turn(context, tokens, fields.logprobs(metrics, "logprobs", len(tokens), where), where)
