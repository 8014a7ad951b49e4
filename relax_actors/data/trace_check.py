"""Checks of traces: of all traces of files, and of what a run would train of its first rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from relax_actors.config.data import DataSection
from relax_actors.data.check import note_source
from relax_actors.data.checked_run import CheckedRun
from relax_actors.data.mixture import first_items
from relax_actors.data.model_folder import measure
from relax_actors.data.source import SourceSettings
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.data.trace_files import TraceFiles
from relax_actors.data.trace_maker import TraceMaker, checked_text, prompt_of_traces, traces_of
from relax_actors.data.traces import TraceRows
from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import Trajectory
from relax_actors.traces.formats import format_of, trace_of
from relax_actors.traces.rows import REWARD, trajectory_of

SAMPLED_ROWS = 200
"""Rows of a data source that are read."""


@dataclass(slots=True)
class ExaminedTraces:
    """What files of traces hold.

    Attributes:
        traces: number of traces.
        rows: number of rows.
        formats: names of their formats.
        tokens: tokens of all sequences.
        trained: tokens with a true loss mask.
        without_reward: traces without a reward.
        errors: what is not exact, with file and line.
    """

    traces: int = 0
    rows: int = 0
    formats: set[str] = field(default_factory=set)
    tokens: int = 0
    trained: int = 0
    without_reward: int = 0
    errors: list[str] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """Return plain data."""
        return {name: getattr(self, name) for name in self.__slots__} | {"formats": sorted(self.formats)}


def examine_files(path: Path, model: Path | None) -> ExaminedTraces:
    """Read all traces of files one by one; compare them with the tokenizer of `model`.

    Raises:
        ConfigError: no such file, or no such model.
    """
    files, examined = TraceFiles(SourceSettings(path=path)), ExaminedTraces()
    tokenizer, vocabulary = (None, 0) if model is None else (Tokenizer(model), measure(model).vocabulary)
    for number in range(len(files)):
        examined.traces += 1
        try:
            where, record = files.place(number), files.record(number)
            trace = trace_of(record, where)
            if isinstance(record, dict):
                examined.formats.add(format_of(record, where))
            if tokenizer is not None:
                checked_text(trace, tokenizer, vocabulary)
        except RowError as error:
            examined.errors.append(str(error))
            continue
        examined.tokens += sum(len(sequence.token_ids) for sequence in trace.sequences)
        examined.trained += trace.trained_tokens
        examined.without_reward += trace.reward is None
    rows = TraceRows(files)
    examined.rows = len(rows)
    if not examined.errors:
        examined.errors = _problems(rows)
    return examined


def _problems(rows: TraceRows) -> list[str]:
    """Return why rows of exact traces are unusable: other prompts, or nothing trained."""
    problems = []
    for number in range(len(rows)):
        try:
            trajectory_of(rows.traces(number))
        except RowError as error:
            problems.append(str(error))
    return problems


def check_traces(run: CheckedRun, data: DataSection, where: str) -> Iterator[str]:
    """Make the first rows of traces into trajectories, and note what of them is trained.

    Raises:
        ConfigError: the source does not open, or none of the rows can be trained.
    """
    source = run.source(data)
    if run.model is None:
        return
    config, tokenizer = run.config, run.model.tokenizer
    facts = run.model.facts
    maker = TraceMaker(traces_of(data), tokenizer, facts.vocabulary, as_examples=config.from_data)
    most = min(facts.context_length, config.trainer.max_tokens_per_microbatch)
    good, bad = list[Trajectory](), list[str]()
    needs_reward = config.reward.function == "recorded" and not config.from_data
    count = min(SAMPLED_ROWS, len(source))
    for item in first_items(source, count):
        try:
            task = source[item]
            prompt_of_traces(task, tokenizer, seed=0, min_version=0)
            good.append(maker.of(task, 0))
            _check_row(good[-1], most, task.origin, needs_reward=needs_reward)
        except RowError as error:
            bad.append(str(error))
    if len(bad) == count:
        msg = f"{where}: none of the first {count} rows can be trained; the first: {bad[0]}"
        raise ConfigError(msg)
    if bad:
        yield f"{where}: {len(bad)} of the first {count} rows will be quarantined; the first: {bad[0]}"
    yield from note_source(config, data, source, where)
    samples = sum(len(row.texts) for row in good)
    tokens = sum(sum(row.sequence_lengths) for row in good)
    trained = sum(int(row.trained.sum()) for row in good)
    yield (
        f"{where}: {len(source)} rows of recorded samples, {samples} samples in the first {len(good)} usable rows; "
        f"{trained / tokens:.0%} of their tokens are trained"
    )
    if data.shuffle:
        yield f"{where}: rows are shuffled; set {where}.shuffle = false to train them in the order of the files"


def _check_row(row: Trajectory, most: int, where: str, *, needs_reward: bool) -> None:
    """Raise RowError if a row is too long, or has no reward."""
    if (longest := int(np.max(row.sequence_lengths))) > most:
        msg = (
            f"{where}: it has {longest} tokens, more than the {most} of the model's context or of "
            "trainer.max_tokens_per_microbatch; raise that"
        )
        raise RowError(msg)
    if needs_reward and REWARD not in row.metrics:
        msg = f"{where}: it has no reward; record one, or set reward.function to a function that computes it"
        raise RowError(msg)
