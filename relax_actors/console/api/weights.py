"""`/api/weights`: versions of the weights, their sizes, and the actors that serve them."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass

from relax_actors.console.query import Query
from relax_actors.console.run import ConsoleRun

MAX_VERSIONS = 500


@dataclass(frozen=True, slots=True)
class Version:
    """One version of the weights.

    Attributes:
        version: its number.
        time: Unix time in seconds at which it was published.
        fingerprint: digest of the weights.
        base: version that its files are a delta to; None for a full set.
        files: number of its files.
        size: bytes of its files; 0 if no actor reads them.
        checkpoint: whether a durable checkpoint covers it.
        evaluated: mean reward over held-out prompts; None if it was not evaluated.
        served_by: actors that generate with it now.
    """

    version: int
    time: float
    fingerprint: str
    base: int | None
    files: int
    size: int
    checkpoint: bool
    evaluated: float | None
    served_by: list[str]


@dataclass(frozen=True, slots=True)
class WeightsAnswer:
    """Number of versions that the table knows, and the newest of them."""

    count: int
    versions: list[Version]


async def answer(query: Query) -> WeightsAnswer:
    """Return the newest versions, and those with a checkpoint."""
    picture = await query.run.refresh(whole=True)
    serving = await _serving(query.run) if query.run.live else {}
    newest = sorted(picture.weights, reverse=True)
    shown = sorted({*newest[:MAX_VERSIONS], *(v for v in picture.checkpoints if v in picture.weights)}, reverse=True)
    versions = []
    for number in shown:
        if (cell := picture.version(number)) is None:
            continue
        evaluation = picture.evaluations.get(number)
        versions.append(
            Version(
                number,
                picture.weights[number].stored,
                cell.fingerprint,
                cell.base_version,
                len(cell.shards),
                sum(shard.nbytes for shard in cell.shards),
                number in picture.checkpoints,
                evaluation[0].reward if evaluation else None,
                serving.get(number, []),
            )
        )
    return WeightsAnswer(len(newest), versions)


async def _serving(run: ConsoleRun) -> dict[int, list[str]]:
    """Return the actors that report a version of the weights, by version."""
    actors = [name for name in run.book.current() if name.startswith(("rollout.", "gateway.", "actor_fwd."))]
    by_version: dict[int, list[str]] = defaultdict(list)
    for actor, data in (await run.last_metrics(actors)).items():
        with suppress(ValueError, AttributeError, TypeError):
            version = json.loads(data).get("version")
            if isinstance(version, int):
                by_version[version].append(actor)
    return by_version
