"""`/api/answers`: answers of versions to held-out prompts, with pass@k by set; a prompt's answers over all versions."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

from relax_actors.console.errors import RequestError
from relax_actors.console.query import Query
from relax_actors.evaluation.figures import figures_of
from relax_actors.evaluation.records import Record, read_evaluation, versions_in
from relax_actors.runtime.run_folder import RunFolder

PAGE = 100


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to held-out prompts.

    Attributes:
        version: version that answered; None where one prompt is shown over all versions.
        figures: figures of each set, by name.
        total: rows of the version, or versions of the prompt.
        rows: a part of them, from `first` on.
    """

    version: int | None
    figures: dict[str, Any]
    total: int
    rows: list[dict[str, Any]]


async def answer(query: Query) -> Answers:
    """Return the rows of parameter `version` from `first` on; or with `index` the answers to one prompt by version."""
    if (index := query.number("index")) is not None:
        return await asyncio.to_thread(_of_prompt, query.run.folder, index)
    return await asyncio.to_thread(
        _of_version, query.run.folder, query.needed("version"), query.number("first", 0) or 0
    )


def _of_version(folder: RunFolder, version: int, first: int) -> Answers:
    if version not in versions_in(folder.evaluations):
        msg = f"the folder of the run has no answers of version {version}; /api/evaluations lists those that it has"
        raise RequestError(404, msg, "unknown_version")
    evaluated = read_evaluation(folder.evaluation(version))
    rows = [_row(record, version) for record in evaluated.records[first : first + PAGE]]
    figures = {name: figures.json() for name, figures in figures_of(evaluated).items()}
    return Answers(version, figures, len(evaluated.records), rows)


def _of_prompt(folder: RunFolder, index: int) -> Answers:
    rows = []
    for version in versions_in(folder.evaluations):
        records = read_evaluation(folder.evaluation(version)).records
        rows += [_row(record, version) for record in records if record.row == f"eval.{version}.{index}"]
    if not rows:
        msg = f"no evaluated version has a held-out prompt {index}"
        raise RequestError(404, msg, "unknown_prompt")
    return Answers(None, {}, len(rows), rows)


def _row(record: Record, version: int) -> dict[str, Any]:
    return {"version": version, "index": int(record.row.rpartition(".")[2]), **asdict(record)}
