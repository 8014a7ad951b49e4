"""`/api/advice`: what is wrong with a run and what to do about it, as `relax doctor` says it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from relax_actors.console.query import Query
from relax_actors.console.run import ConsoleRun
from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.examination import examine
from relax_actors.monitoring.finding import Finding


@dataclass(frozen=True, slots=True)
class Advice:
    """Findings, the most important first; empty if nothing is wrong."""

    findings: list[Finding]


async def answer(query: Query) -> Advice:
    """Examine a run."""
    await query.run.connection()
    return Advice(await asyncio.to_thread(_examined, query.run))


def _examined(run: ConsoleRun) -> list[Finding]:
    with connected(str(run.folder.root), run.access) as at:
        return examine(at)
