"""`/api/evaluations`: results over held-out prompts, by version and set."""

from __future__ import annotations

from dataclasses import dataclass

from relax_actors.console.query import Query
from relax_actors.evaluation.records import versions_in
from relax_actors.messages.cells import SetResult


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a version: mean reward of its scored rows, and the results of its sets."""

    version: int
    time: float
    reward: float
    rows: int
    sets: dict[str, SetResult]
    kept: bool
    """Whether the folder of the run has its answers."""


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Results, the oldest version first."""

    results: list[Result]


async def answer(query: Query) -> Evaluations:
    """Return the results of all evaluated versions."""
    picture = await query.run.refresh()
    kept = set(versions_in(query.run.folder.evaluations))
    return Evaluations(
        [
            Result(version, stored, cell.reward, cell.rows, cell.sets, version in kept)
            for version, (cell, stored) in sorted(picture.evaluations.items())
        ]
    )
