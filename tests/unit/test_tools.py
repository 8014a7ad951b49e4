"""Tools: schemas from type hints, checked arguments, and what the model is told of a call that fails."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from relax_actors.envs import Step
from relax_actors.envs.tools import Tool, ToolEnvironment
from relax_actors.errors import ConfigError

CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


def search(query: str, top: int = 3, order: Literal["new", "old"] = "new") -> list[str]:
    """Search the articles
    of the shop.

    Args:
        query: words to look for,
            separated by spaces.
        top: number of articles.
        order: which come first.
    """
    return [f"{query} {order} {i}" for i in range(top)]


async def fail(reason: str) -> str:
    """Always fail."""
    raise RuntimeError(reason)


def picture(size: int) -> list[dict[str, Any]]:
    """Draw."""
    return [{"type": "image", "image": b"\0" * size}, {"type": "text", "text": "drawn"}]


def long() -> str:
    """Say much."""
    return "a" * 50_000 + "z"


def leave() -> None:
    """End the process."""
    sys.exit(3)


def garble() -> None:
    """Raise an error whose text is not UTF-8."""
    msg = b"bad \xff".decode(errors="surrogateescape")
    raise ValueError(msg)


def count() -> Iterator[int]:
    """Count."""
    yield 1


def colours() -> dict[str, set[str]]:
    """List the colours."""
    return {"colours": {"red", "green", "blue"}}


class Shop(ToolEnvironment):
    tools: ClassVar[Sequence[Callable[..., Any] | Tool]] = (search, fail, picture, long, leave, garble, count, colours)

    def score(self, answer: str) -> float:
        return float(answer == self.task["answer"])


def step(*actions: str, **options: Any) -> Step:
    """Play an episode; return the answer to its last action."""
    environment = Shop.build(options)

    async def play() -> Any:
        environment.reset({"prompt": "?", "answer": "blue"}, np.random.default_rng(0))
        return [await environment.step(action) for action in actions][-1]  # type: ignore[misc]

    return asyncio.run(play())  # type: ignore[no-any-return]


def messages(found: Step) -> list[dict[str, Any]]:
    """Return the messages of a step's observation."""
    assert isinstance(found.observation, list)
    return [dict(message) for message in found.observation]


def test_schema_follows_from_type_hints_and_docstring() -> None:
    order = {"type": "string", "enum": ["new", "old"], "default": "new", "description": "which come first."}
    assert Tool(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the articles of the shop.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "words to look for, separated by spaces."},
                    "top": {"type": "integer", "default": 3, "description": "number of articles."},
                    "order": order,
                },
                "required": ["query"],
            },
        },
    }


def test_calls_of_an_answer_are_answered_in_order() -> None:
    two = CALL.format("search", '{"query": "car", "top": 1}') + CALL.format("search", '{"query": "bus", "top": 1}')
    answer = step(two)
    assert isinstance(answer.observation, list)
    ids = [message.pop("tool_call_id") for message in answer.observation]
    assert answer.observation == [
        {"role": "tool", "name": "search", "content": '["car new 0"]'},
        {"role": "tool", "name": "search", "content": '["bus new 0"]'},
    ]
    assert len(set(ids)) == 2
    assert (answer.done, answer.reward, answer.metrics) == (False, None, {"tool_calls": 2, "tool_errors": 0})


def test_same_call_in_two_turns_has_two_ids_which_a_replay_repeats() -> None:
    call = CALL.format("search", '{"query": "car", "top": 1}') + CALL.format("search", "{")
    turns = [[message["tool_call_id"] for message in messages(step(*[call] * n))] for n in (1, 2, 2)]
    assert len({*turns[0], *turns[1]}) == 4
    assert turns[1] == turns[2]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (CALL.format("fail", '{"reason": "no stock"}'), r"Error: fail raised RuntimeError: no stock"),
        (
            CALL.format("buy", "{}"),
            r"Error: there is no tool 'buy'; tools are search, fail, picture, long, leave.*",
        ),
        (CALL.format("leave", "{}"), r"Error: leave raised SystemExit: 3"),
        (CALL.format("garble", "{}"), r"Error: garble raised ValueError: bad \?"),
        (CALL.format("bu\\ud800y", "{}"), r"Error: there is no tool .*"),
        (
            CALL.format("count", "{}"),
            r"Error: the tool returned a generator, which has no text; let it return a text, a number, a list.*",
        ),
        (CALL.format("search", "{}"), r"Error: search: argument 'query' is missing"),
        (
            CALL.format("search", '{"query": "x", "top": "many", "page": 2}'),
            r"Error: search: argument 'top': Input should be a valid integer, .*, got 'many'; no argument 'page'.*",
        ),
        ("<tool_call>\n{nonsense\n</tool_call>", r"Error: the tool call .* cannot be made: it is not valid JSON .*"),
    ],
)
def test_failed_call_is_explained_to_the_model(call: str, told: str) -> None:
    answer = step(call)
    (message,) = messages(answer)
    assert re.fullmatch(told, message["content"], re.DOTALL), message["content"]
    str(message).encode()
    assert (answer.done, answer.metrics["tool_errors"]) == (False, 1)


def test_result_with_a_set_is_the_same_in_every_process() -> None:
    (message,) = messages(step(CALL.format("colours", "{}")))
    assert message["content"] == '{"colours": ["blue", "green", "red"]}'


def test_result_with_an_image_keeps_its_parts() -> None:
    (message,) = messages(step(CALL.format("picture", '{"size": 3}')))
    assert message["content"] == [{"type": "image", "image": b"\0\0\0"}, {"type": "text", "text": "drawn"}]


def test_long_result_loses_its_middle() -> None:
    (message,) = messages(step(CALL.format("long", "{}"), max_result_chars=100))
    assert message["content"] == f"{'a' * 50}\n[... 49901 characters left out ...]\n{'a' * 49}z"


@pytest.mark.parametrize(("answer", "reward"), [("blue", 1.0), ("<think>red?</think> blue", 1.0), ("red", 0.0)])
def test_answer_without_a_call_ends_the_episode(answer: str, reward: float) -> None:
    found = step(CALL.format("search", '{"query": "x"}'), answer)
    assert (found.done, found.reward) == (True, reward)


def no_hint(x) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Have no type hint."""


def many(*items: str) -> None:
    """Take any number."""


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (no_hint, "tool no_hint: argument 'x' has no type hint; write `x: <type>`"),
        (many, "tool many: argument *items: 'str' cannot be given by name; write arguments with names"),
    ],
)
def test_function_that_no_schema_describes_is_refused(function: Callable[..., Any], error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}$"):
        Tool(function)
