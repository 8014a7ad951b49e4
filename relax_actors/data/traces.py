"""Recorded samples as data: a row is the traces of one prompt, which a run trains without a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from relax_actors.data.fields import check_index
from relax_actors.data.prompt_maker import check_size
from relax_actors.data.source import DataSource, SourceSettings
from relax_actors.data.task import Task
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.data.trace_files import TraceFiles
from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import Prompt, Trajectory
from relax_actors.traces import Trace, TraceError, trajectory_of
from relax_actors.traces.turns import turns_of

MARK = "trace"
"""Key of the metadata of a row: item of the source, and checksum of its traces."""


def open_traces(settings: SourceSettings) -> TraceRows:
    """Open `data.path` as traces.

    Raises:
        ConfigError: no such file, or a file that cannot be read.
    """
    if settings.fields:
        msg = "data.fields renames fields of rows, and traces have formats of their own; leave it out"
        raise ConfigError(msg)
    return TraceRows(TraceFiles(settings), settings.size)


class TraceRows:
    """Rows of traces. Traces that follow each other and are of one row, or have the same prompt, are one row.

    Args:
        files: the traces, each of which is read once to find the rows.
        size: most rows; None for all.
    """

    def __init__(self, files: TraceFiles, size: int | None = None) -> None:
        self._files = files
        starts, before = list[int](), ""
        for number in range(len(files)):
            key = self._key(number)
            if not key or key != before:
                starts.append(number)
            before = key
        self._rows = list(zip(starts, [*starts[1:], len(files)], strict=True))[:size]

    def _key(self, number: int) -> str:
        """Return what the traces of a row have in common; empty for a trace that cannot be read."""
        with suppress(RowError):
            trace = self._files.trace(number)
            if trace.row:
                return f"{trace.run}/{trace.row}"
            return xxhash.xxh3_128_hexdigest(trace.prompt_tokens.tobytes())
        return ""

    def __len__(self) -> int:
        return len(self._rows)

    def traces(self, i: int) -> list[Trace]:
        """Return the traces of a row.

        Raises:
            IndexError: i is negative or not below the length.
            RowError: one of them is not exact.
        """
        check_index(i, len(self._rows))
        return [self._files.trace(number) for number in range(*self._rows[i])]

    def __getitem__(self, i: int) -> Task:
        traces = self.traces(i)
        first = traces[0]
        for trace in traces:
            if trace.media:
                msg = (
                    f"{trace.origin}: it has media ({trace.media[0].name[:60]!r}), whose features a trace lacks; "
                    "it can be read and written, but not trained"
                )
                raise TraceError(msg)
            if "reward" in trace.token_values:
                msg = (
                    f"{trace.origin}: it has rewards of single tokens, which are not trained from traces; remove the "
                    "row, or train it by its own run"
                )
                raise TraceError(msg)
        mark = {"item": i, "xxh3": digest_of(traces)}
        prompt: Any = first.prompt_messages or first.prompt
        return Task(prompt, first.answer, first.metadata | {MARK: mark}, first.origin, traces=tuple(traces))


def digest_of(traces: Sequence[Trace]) -> str:
    """Return the checksum of the traces of a row."""
    return xxhash.xxh3_128_hexdigest("".join(trace.digest for trace in traces).encode())


def prompt_of_traces(task: Task, tokenizer: Tokenizer, **fields: Any) -> Prompt:
    """Return the first cell of a row of traces.

    Args:
        task: the row, of a source of traces.
        tokenizer: of the model.
        fields: further fields of the cell, such as seed and min_version.

    Raises:
        RowError: the row is too large for a cell, or has a token that the model does not know.
    """
    check_size(task, task.prompt)
    tokens = task.traces[0].prompt_tokens
    text, messages = (task.prompt, []) if isinstance(task.prompt, str) else (task.traces[0].prompt, task.prompt)
    return Prompt(
        text or spelled(tokenizer, tokens, task.origin), tokens, task.answer, task.metadata, messages=messages, **fields
    )


class TraceMaker:
    """Makes the trajectories of rows of traces.

    Args:
        source: the data.
        tokenizer: of the model.
        vocabulary: number of tokens of the model.
    """

    def __init__(self, source: DataSource, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._source, self._tokenizer, self._vocabulary = source, tokenizer, vocabulary

    def make(self, row: Prompt) -> Trajectory:
        """Make the trajectory of a row: its tokens, masks and log-probs as they were recorded.

        Sampled tokens get the oldest version that may generate the row.

        Raises:
            RowError: the traces are not exact, have several prompts, or have changed since the row was admitted.
        """
        mark = row.metadata.get(MARK)
        item = mark["item"] if isinstance(mark, dict) and type(mark.get("item")) is int else -1
        if not isinstance(mark, dict) or not 0 <= item < len(self._source):
            msg = f"the row names no item of {len(self._source)} rows of traces; requeue it, or restore data.path"
            raise RowError(msg)
        task = self._source[item]
        if digest_of(task.traces) != mark.get("xxh3"):
            msg = f"{task.origin}: its traces have changed since the row was admitted; restore the files of data.path"
            raise RowError(msg)
        return self.of(task, row.min_version)

    def of(self, task: Task, version: int) -> Trajectory:
        """Make the trajectory of a task; errors as `make`."""
        return trajectory_of([self._checked(trace) for trace in task.traces], version)

    def _checked(self, trace: Trace) -> Trace:
        return checked_text(trace, self._tokenizer, self._vocabulary)


def checked_text(trace: Trace, tokenizer: Tokenizer, vocabulary: int) -> Trace:
    """Return a trace whose text its tokens spell; a trace without a text gets one.

    White space is not compared, nor are tokens around the text: a recorded answer may lack its reasoning, its calls of
    tools and its stop token.

    Raises:
        TraceError: a token is unknown to the model, or the tokens spell another text.
    """
    where = trace.origin or trace.name
    turns = [turn for sequence in trace.sequences for turn in turns_of(sequence)]
    for sequence in trace.sequences:
        if len(unknown := sequence.token_ids[sequence.token_ids >= vocabulary]):
            msg = (
                f"{where}: token {int(unknown[0])} is none of the {vocabulary} tokens of the model; traces are trained "
                "with the tokenizer that they were recorded with"
            )
            raise TraceError(msg)
    spelled = "".join(tokenizer.decode(turn.tokens) for turn in turns)
    if not trace.text:
        return replace(trace, text=spelled)
    if "".join(trace.text.split()) not in "".join(spelled.split()):
        msg = (
            f"{where}: its tokens spell {spelled[:60]!r}, and its text is {trace.text[:60]!r}; train traces "
            "with the tokenizer that they were recorded with"
        )
        raise TraceError(msg)
    return trace


def spelled(tokenizer: Tokenizer, tokens: np.ndarray[Any, Any], where: str) -> str:
    """Return the text of tokens.

    Raises:
        TraceError: the tokenizer does not know one.
    """
    try:
        return tokenizer.spell(tokens)
    except OverflowError as error:
        msg = f"{where}: its prompt has tokens that the model does not know ({error})"
        raise TraceError(msg) from error
