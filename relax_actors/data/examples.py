"""Trajectories of rows of the data: examples, pairs, and labelled answers and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.config import Config
from relax_actors.config.data import DataSection
from relax_actors.data.answer_tokens import AnswerTokens, Example, Message
from relax_actors.data.fields import checked_prompt
from relax_actors.data.prompt_maker import MAX_SECONDS, check_size
from relax_actors.data.targets import Targets, at_end, is_good
from relax_actors.data.task import Task
from relax_actors.data.time_limit import call_within
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError, SlowRowError
from relax_actors.messages import NOT_SAMPLED, FinishReason, Prompt, Trajectory
from relax_actors.messages.trajectory import LABEL

Array = NDArray[Any]
OTHER = "other_answer"
"""Field of a labelled row: the answer to another prompt, for the KL of KTO."""
PAIR = ("chosen", "rejected")
"""Fields of the answers of a pair: a text, the messages of an answer, or whole conversations."""


def row_of(task: Task, other: Task | None = None, **fields: Any) -> Prompt:
    """Return the first cell of a row from the data, without tokens.

    Args:
        task: its task.
        other: task whose answer the row's is compared with; None if none is.
        fields: further fields of the cell, such as seed and min_version.

    Raises:
        RowError: the row is too large for a cell.
    """
    check_size(task, [task.prompt, "" if other is None else other.answer])
    text, messages = (task.prompt, []) if isinstance(task.prompt, str) else ("", task.prompt)
    metadata = task.metadata if other is None else task.metadata | {OTHER: other.answer}
    return Prompt(text, np.zeros(0, np.int32), task.answer, metadata, messages=messages, **fields)


class ExampleMaker:
    """Makes the trajectories of rows of the data.

    Args:
        config: configuration of the run.
        data: section of the source.
        tokenizer: of the model.
        context: maximum tokens of a sequence of the model.
    """

    def __init__(self, config: Config, data: DataSection, tokenizer: Tokenizer, context: int) -> None:
        algorithm = config.algorithm
        self._settings, self._tokenizer, self._rows = config.examples, tokenizer, algorithm.rows
        self._chats, self._answers = data.chat, AnswerTokens(tokenizer, config.examples, data)
        self._compares, self._trains_scores = algorithm.compares_answers, algorithm.trains_scores
        self._targets = Targets(algorithm.scores.classes, config.examples.step_separator)
        # The answers of a row are in one micro-batch.
        self._most = min(context, config.trainer.max_tokens_per_microbatch // (2 if self._compares else 1))

    def make(self, row: Prompt) -> Trajectory:
        """Make the trajectory of a row: one sample, or the chosen and the rejected one of a pair.

        Raises:
            RowError: the row lacks an answer or a label, nothing of it is trained, it is too long, its answers are the
                same, or the chat template refuses or rewrites its messages.
            SlowRowError: the chat template or the tokenizer did not end in time.
        """
        examples = [self._limited(example) for example in self.examples(row)]
        if self._rows == "pairs":
            _check_pair(*examples)
        if not self._trains_scores:
            label = [1.0 if is_good(row.metadata) else -1.0, 0.0] if self._rows == "labelled" else []
            return self._trajectory(examples, label)
        if self._rows != "steps":
            fields = row.metadata
            target = self._targets.margin(fields) if self._rows == "pairs" else self._targets.label(fields)
            examples = [at_end(example, target) for example in examples]
        return self._trajectory(examples, [])

    def examples(self, row: Prompt) -> list[Example]:
        """Return the examples of a row in full length; errors as `make`."""
        if row.messages or (self._tokenizer.has_chat_template if self._chats is None else self._chats):
            self._tokenizer.formatter  # noqa: B018 loads transformers, which takes longer than a row
        try:
            return call_within(MAX_SECONDS, lambda: self._examples(row))
        except TimeoutError as error:
            msg = (
                f"the chat template and the tokenizer did not end within {MAX_SECONDS:g} s; fix them or remove the row"
            )
            raise SlowRowError(msg) from error
        except RuntimeError as error:
            raise RowError(str(error)) from error

    def _examples(self, row: Prompt) -> list[Example]:
        if self._rows == "steps":
            return [self._answers.steps(row, *self._targets.steps(row.answer, row.metadata))]
        return [self._answers.example(row, answer) for answer in self._said(row)]

    def _said(self, row: Prompt) -> list[str | list[Message]]:
        """Return the answers of a row."""
        if OTHER in row.metadata and self._rows == "labelled" and not self._trains_scores:
            return [row.answer, row.metadata[OTHER]]
        if self._rows != "pairs":
            return [row.answer]
        chosen, rejected = (_answer_of(row.metadata, name) for name in PAIR)
        if chosen == rejected:
            msg = "chosen and rejected are the same; remove the row"
            raise RowError(msg)
        return [chosen, rejected]

    def _limited(self, example: Example) -> Example:
        """Return an example that fits the model and a micro-batch, with the first token and all behind the last left.

        Raises:
            RowError: it does not fit, or none of its tokens is trained.
        """
        ids, trained = example.ids, example.mask.copy()
        trained[:1] = False  # no token before it
        is_cut = len(ids) > self._most
        if is_cut and self._settings.oversize == "drop":
            half = ", half of which is for the other answer" if self._compares else ""
            msg = (
                f"it has {len(ids)} tokens, more than the {self._most} of the model's context or of "
                f'trainer.max_tokens_per_microbatch{half}; raise that, or set examples.oversize = "truncate"'
            )
            raise RowError(msg)
        if not trained[: self._most].any():
            where = f" among the first {self._most}" if is_cut else ""
            msg = f"none of its tokens is trained{where}; correct the row, or set examples.train"
            raise RowError(msg)
        end = int(np.flatnonzero(trained[: self._most])[-1]) + 1
        if example.targets is None:
            return Example(ids[:end], trained[:end], is_cut)
        return Example(ids[:end], example.trained[:end], is_cut, example.targets[:end])

    def _trajectory(self, examples: Sequence[Example], label: Sequence[float]) -> Trajectory:
        """Return the trajectory of examples, whose prompt is what they share before the first trained token.

        `label` has the label of each, if the row has one.
        """
        first = min(int(np.argmax(example.trained)) for example in examples)
        least = min(len(example.ids) for example in examples)
        same = np.all([example.ids[:least] == examples[0].ids[:least] for example in examples], axis=0)
        prompt = min(first, int(np.argmin(same)) if not same.all() else least)
        if not prompt:
            msg = "its answers begin with different tokens, so that they have no prompt in common; give them one"
            raise RowError(msg)
        own = np.concatenate([example.ids[prompt:] for example in examples])
        targets = [example.targets for example in examples if example.targets is not None]
        return Trajectory(
            prompt_tokens=examples[0].ids[:prompt],
            lengths=np.array([len(example.ids) - prompt for example in examples], np.int32),
            token_ids=own,
            logprobs=np.zeros(len(own), np.float32),
            versions=np.full(len(own), NOT_SAMPLED, np.int32),
            texts=[self._tokenizer.decode(example.ids[example.trained]) for example in examples],
            finish_reasons=[(FinishReason.LENGTH if e.is_cut else FinishReason.STOP).value for e in examples],
            loss_mask=np.concatenate([example.mask[prompt:] for example in examples]),
            metrics={LABEL: [*label[: len(examples)]]} if label else {},
            targets=np.concatenate([np.nan_to_num(t[prompt:]) for t in targets]) if targets else None,
        )


def _answer_of(fields: Mapping[str, Any], name: str) -> str | list[Message]:
    """Return an answer of a pair.

    Raises:
        RowError: the row lacks it, or it is neither a text nor messages.
    """
    if name not in fields:
        msg = f"it has no field {name!r}, which a row of a pair needs; its fields are {', '.join(fields) or 'none'}"
        raise RowError(msg)
    return checked_prompt(fields[name], f"field {name!r}")[0]


def _check_pair(chosen: Example, rejected: Example) -> None:
    """Check that a pair has one prompt and two answers.

    Raises:
        RowError: it has not.
    """
    asked, other = (example.ids[: int(np.argmax(example.trained))] for example in (chosen, rejected))
    if not np.array_equal(asked, other):
        msg = "chosen and rejected have different prompts; write the same messages before both answers"
        raise RowError(msg)
    if np.array_equal(chosen.ids, rejected.ids):
        msg = "chosen and rejected have the same tokens, as far as they are trained; remove the row"
        raise RowError(msg)
