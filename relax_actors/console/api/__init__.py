"""Answers of the console, a file each: `GET /api/<name>?run=NAME` returns the dataclass of `api/<name>.py` as JSON.

To add one, write a module with `async def answer(query: Query)` that returns a dataclass or a dict of plain data, and
add its name to `NAMES`. An error that a person can mend is a `RequestError` or a `RelaxError`; its text is shown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from relax_actors.console.query import Query
from relax_actors.registry import Registry

Answer = Callable[[Query], Awaitable[Any]]
NAMES = (
    "runs",
    "run",
    "curves",
    "ledger",
    "events",
    "actors",
    "weights",
    "evaluations",
    "answers",
    "rows",
    "row",
    "anatomy",
    "media",
    "scaling",
    "advice",
    "timeline",
    "profile",
)
ANSWERS: Registry[Answer] = Registry(
    "console answer",
    "relax_actors.console_answers",
    {name: f"relax_actors.console.api.{name}:answer" for name in NAMES},
)
