"""Prompts and trajectories of rows of traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.config.data import DataSection
from relax_actors.data.prompt_maker import check_size
from relax_actors.data.source import SourceSettings
from relax_actors.data.task import Task
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.data.traces import MARK, Take, TraceRows, open_traces
from relax_actors.messages import NOT_SAMPLED, Prompt, Trajectory
from relax_actors.messages.said import said
from relax_actors.traces import Trace, TraceError, trajectory_of
from relax_actors.traces.turns import turns_of


def prompt_of_traces(task: Task, tokenizer: Tokenizer, **fields: Any) -> Prompt:
    """Return the first cell of a row of traces, with fields such as seed.

    Raises:
        RowError: the row is too large for a cell, or has a token that the model does not know.
    """
    check_size(task, task.prompt)
    tokens = task.traces[0].prompt_tokens
    text, messages = (task.prompt, []) if isinstance(task.prompt, str) else (task.traces[0].prompt, task.prompt)
    return Prompt(
        text or spelled(tokenizer, tokens, task.origin), tokens, task.answer, task.metadata, messages=messages, **fields
    )


def traces_of(data: DataSection) -> TraceRows:
    """Return the traces of the files of a section [data]; errors as `open_traces`."""
    return open_traces(SourceSettings(path=data.path, split=data.split, options=data.options))


class TraceMaker:
    """Makes the trajectories of rows of traces.

    Args:
        source: the traces of the files of the data, whatever part of them is admitted.
        tokenizer: of the model.
        vocabulary: number of tokens of the model.
        as_examples: whether samples are examples, which are trained as if no policy had sampled them.
    """

    def __init__(self, source: TraceRows, tokenizer: Tokenizer, vocabulary: int, *, as_examples: bool = False) -> None:
        self._as_examples = as_examples
        self._source, self._tokenizer, self._vocabulary = source, tokenizer, vocabulary

    def make(self, row: Prompt) -> Trajectory:
        """Make the trajectory of a row: its tokens, masks and log-probs as they were recorded.

        Sampled tokens get the oldest version that may generate the row.

        Raises:
            RowError: the traces are not exact, have several prompts, or have changed since the row was admitted.
        """
        return self.of(self._source.marked(row.metadata.get(MARK)), row.min_version)

    def of(self, task: Task, version: int) -> Trajectory:
        """Make the trajectory of a task; errors as `make`."""
        if self._as_examples and len(task.traces) > 1:
            msg = (
                f"{task.origin}: it has {len(task.traces)} samples, and an example is one sample; set "
                f'data.options.take to "{Take.BEST}" or "{Take.EACH}"'
            )
            raise TraceError(msg)
        made = trajectory_of([self._checked(trace) for trace in task.traces], version)
        return _as_example(made) if self._as_examples else made

    def _checked(self, trace: Trace) -> Trace:
        return checked_text(trace, self._tokenizer, self._vocabulary)


def _as_example(made: Trajectory) -> Trajectory:
    """Return a sample's trajectory as an example, compared with no policy of this run."""
    total = len(made.token_ids)
    return replace(
        made,
        versions=np.full(total, NOT_SAMPLED, np.int32),
        logprobs=np.zeros(total, np.float32),
        loss_mask=made.trained,
        spans=None,
        turn_rewards=None,
        conversations=None,
        fingerprints=[],
        metrics={},
    )


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
    parts = _parts(trace)
    if not any(_have([spell(turn.tokens) for turn in turns], parts) for spell in (tokenizer.decode, tokenizer.spell)):
        msg = (
            f"{where}: its tokens spell {spelled[:60]!r}, and its text is {trace.text[:60]!r}; train traces "
            "with the tokenizer that they were recorded with"
        )
        raise TraceError(msg)
    return trace


def _parts(trace: Trace) -> list[str]:
    """Return a trace's text without white space, turn by turn if messages have turns."""
    text, parts, at = _dense(trace.text), list[str](), 0
    for role, content in said(trace.messages):
        if role == "assistant" and (part := _dense(content)) and text.startswith(part, at):
            parts.append(part)
            at += len(part)
    return parts if at == len(text) else [text]


def _have(turns: list[str], parts: list[str]) -> bool:
    """Return whether each part is in a turn, in any order; a single one may span turns."""
    texts = [_dense(turn) for turn in turns] if len(parts) > 1 else [_dense("".join(turns))]
    at = 0
    for part in parts:
        place = next((i for i in (*range(at, len(texts)), *range(at)) if part in texts[i]), None)
        if place is None:
            return False
        at = place
    return True


def _dense(text: str) -> str:
    return "".join(text.split())


def spelled(tokenizer: Tokenizer, tokens: NDArray[Any], where: str) -> str:
    """Return the text of tokens; raises TraceError if the tokenizer does not know one."""
    try:
        return tokenizer.spell(tokens)
    except OverflowError as error:
        msg = f"{where}: its prompt has tokens that the model does not know ({error})"
        raise TraceError(msg) from error
