"""`/api/runs`: the runs that the console can show."""

from __future__ import annotations

from dataclasses import dataclass

from relax_actors.console.query import Query


@dataclass(frozen=True, slots=True)
class Runs:
    """Names of the runs beside the one that the console was opened for, the newest first."""

    run: str
    runs: list[str]


async def answer(query: Query) -> Runs:
    """Return the runs."""
    return Runs(query.run.name, list(query.names))
