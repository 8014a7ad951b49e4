"""Answers to held-out prompts that a run's folder keeps, as rows that `relax samples` shows."""

from __future__ import annotations

from relax_actors.errors import ConfigError
from relax_actors.evaluation.records import Evaluated, Record, read_evaluation, versions_in
from relax_actors.monitoring.samples import ShownRow, ShownSample
from relax_actors.runtime.row import parse_row
from relax_actors.runtime.run_folder import RunFolder


def kept_evaluation(folder: RunFolder, version: int | None = None) -> Evaluated:
    """Read a version's answers to held-out prompts, the newest by default.

    Raises:
        ConfigError: the version was not evaluated, or its file cannot be read.
    """
    versions = versions_in(folder.evaluations)
    wanted = max(versions, default=None) if version is None else version
    if wanted is None or wanted not in versions:
        known = ", ".join(map(str, versions)) or "none; a run with [eval] evaluates version 0 before its first step"
        what = "of any version" if version is None else f"of version {version}"
        msg = f"{folder.root} has no answers {what} to held-out prompts; versions that it has: {known}"
        raise ConfigError(msg)
    return read_evaluation(folder.evaluation(wanted))


def shown_row(record: Record) -> ShownRow:
    """Return a record as a row to show."""
    row = parse_row(record.row)
    samples = [
        ShownSample(answer.text, answer.reward, answer.finish_reason, answer.tokens, answer.messages)
        for answer in record.answers
    ]
    prompt = "" if record.messages else record.prompt
    return ShownRow(row, prompt, record.messages, [], record.answer, (row.step, row.step), samples, record.problem)
