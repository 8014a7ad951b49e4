"""Trajectories of rows of the data: examples, pairs, and labelled answers and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.config import Config
from relax_actors.config.data import DataSection
from relax_actors.data.answer_tokens import AnswerTokens, Message
from relax_actors.data.example import Example, end_between_media
from relax_actors.data.fields import checked_prompt
from relax_actors.data.placeholders import arranged_numbers
from relax_actors.data.prompt_maker import MAX_SECONDS, check_size
from relax_actors.data.targets import Targets, at_end, is_good
from relax_actors.data.task import Task
from relax_actors.data.time_limit import call_within
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError, SlowRowError
from relax_actors.media.family import Family
from relax_actors.messages import NOT_SAMPLED, FinishReason, MediaSource, Prompt, Trajectory
from relax_actors.messages.trajectory import LABEL

Array = NDArray[Any]
OTHER = "other_answer"
"""Field of a labelled row: the answer to another prompt, for the KL of KTO."""
PAIR = ("chosen", "rejected")
"""Fields of the answers of a pair: a text, the messages of an answer, or whole conversations."""


Expand = Callable[[Example, Sequence[MediaSource]], Example]
"""Expands the placeholders of an example, with its media in their order."""


def row_of(task: Task, other: Task | None = None, **fields: Any) -> Prompt:
    """Return the first cell of a row from the data, without tokens.

    Args:
        task: its task.
        other: task whose answer the row's is compared with; None if none is.
        fields: further fields of the cell, such as seed, min_version and media.

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
        family: of a model that sees or hears.
        expand: expands the placeholders of media; without it each counts as one token.
    """

    def __init__(
        self,
        config: Config,
        data: DataSection,
        tokenizer: Tokenizer,
        context: int,
        family: Family | None = None,
        expand: Expand | None = None,
    ) -> None:
        algorithm = config.algorithm
        self._family, self._expand, self._rows = family, expand, algorithm.rows
        self._data, self._tokenizer = data, tokenizer
        self._answers = AnswerTokens(tokenizer, config.examples, data, family)
        self._compares, self._trains_scores = algorithm.compares_answers, algorithm.trains_scores
        self._targets = Targets(algorithm.scores.classes, config.examples.step_separator)
        # The answers of a row are in one micro-batch.
        self._most = min(context, config.trainer.max_tokens_per_microbatch // (2 if self._compares else 1))

    def make(self, row: Prompt) -> Trajectory:
        """Make the trajectory of a row: one sample, or the chosen and the rejected one of a pair.

        Raises:
            RowError: the row lacks an answer or a label, nothing of it is trained, it is too long, its answers are the
                same, the chat template refuses or rewrites its messages, or its media do not fit their placeholders.
            SlowRowError: the chat template or the tokenizer did not end in time.
        """
        whole = [self._with_media(example, row) for example in self.examples(row)]
        if self._data.oversize == "split" and self._rows == "examples" and len(whole[0].ids) > self._most:
            return self._divided(whole[0])
        examples = self._limited(whole)
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
        if self._answers.chats(row):
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

    def _with_media(self, example: Example, row: Prompt) -> Example:
        if self._family is None:
            return example
        kinds = self._family.kinds_by_id
        places = [kinds[token] for token in example.ids.tolist() if token in kinds]
        media = [row.media[number] for number in arranged_numbers(places, row.media)]
        return example if self._expand is None else self._expand(example, media)

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

    def _limited(self, examples: Sequence[Example]) -> list[Example]:
        """Return a row's examples, cut to model and micro-batch, without untrained ends.

        Their beginnings are cut off by the same number of tokens, so that answers keep their prompt in common.

        Raises:
            RowError: one does not fit, or none of its tokens is trained.
        """
        longest, most, oversize = max(len(example.ids) for example in examples), self._most, self._data.oversize
        if longest > most and oversize in ("skip", "keep"):
            half = ", half of which is for the other answer" if self._compares else ""
            msg = (
                f"it has {longest} tokens, more than the {most} of the model's context or of "
                f"trainer.max_tokens_per_microbatch{half}; raise that, or set data.oversize to cut rows off"
            )
            raise RowError(msg)
        begin = max(0, longest - most) if oversize == "truncate_left" else 0
        return [self._cut(example.since(begin)) for example in examples]

    def _cut(self, example: Example) -> Example:
        """Return an example cut behind a trained token within `_most`, not within a medium."""
        mask = example.mask.copy()
        mask[:1] = False  # no token before it
        most, is_cut = self._most, example.is_cut or len(example.ids) > self._most
        if is_cut and example.observed is not None:
            most = end_between_media(example.ids, example.observed, most)
        if not mask[:most].any():
            where = f" among the {'last' if example.is_cut else 'first'} {most}" if is_cut else ""
            msg = f"none of its tokens is trained{where}; correct the row, or set examples.train"
            raise RowError(msg)
        end = int(np.flatnonzero(mask[:most])[-1]) + 1
        trained = mask if example.targets is None else example.trained
        return replace(example, trained=trained).until(end, is_cut=is_cut)

    def _divided(self, example: Example) -> Trajectory:
        """Return a long example's trajectory, pieces as sequences; raises RowError with media."""
        pieces = example.pieces(self._most)
        if not pieces:
            msg = "none of its tokens is trained; correct the row, or set examples.train"
            raise RowError(msg)
        shared = [int(np.argmax(pieces[0].trained)), *[0] * (len(pieces) - 1)]
        return Trajectory(
            **_flat(pieces, shared),
            texts=[self._tokenizer.decode(example.ids[1:][example.trained[1:]])],
            finish_reasons=[FinishReason.STOP.value],
            sequence_counts=np.array([len(pieces)], np.int32),
            shared_lengths=np.array(shared, np.int32),
        )

    def _trajectory(self, examples: Sequence[Example], label: Sequence[float]) -> Trajectory:
        """Return the trajectory of examples; their common untrained beginning is the prompt.

        `label` has the label of each, if the row has one.
        """
        first = min(int(np.argmax(example.trained)) for example in examples)
        least = min(len(example.ids) for example in examples)
        same = np.all([example.ids[:least] == examples[0].ids[:least] for example in examples], axis=0)
        prompt = min(first, int(np.argmin(same)) if not same.all() else least)
        if not prompt:
            msg = "its answers begin with different tokens, so that they have no prompt in common; give them one"
            raise RowError(msg)
        targets = [example.targets for example in examples if example.targets is not None]
        return Trajectory(
            **_flat(examples, [prompt] * len(examples)),
            texts=[self._tokenizer.decode(example.ids[example.trained]) for example in examples],
            finish_reasons=[(FinishReason.LENGTH if e.is_cut else FinishReason.STOP).value for e in examples],
            metrics={LABEL: [*label[: len(examples)]]} if label else {},
            targets=np.concatenate([np.nan_to_num(t[prompt:]) for t in targets]) if targets else None,
        )


def _flat(examples: Sequence[Example], shared: Sequence[int]) -> dict[str, Any]:
    """Return examples as fields of a `Trajectory`; `shared` counts prompt tokens of each."""
    parts = list(zip(examples, shared, strict=True))
    own = np.concatenate([example.ids[start:] for example, start in parts])
    return {
        "prompt_tokens": examples[0].ids[: shared[0]],
        "lengths": np.array([len(example.ids) - start for example, start in parts], np.int32),
        "token_ids": own,
        "logprobs": np.zeros(len(own), np.float32),
        "versions": np.full(len(own), NOT_SAMPLED, np.int32),
        "loss_mask": np.concatenate([example.mask[start:] for example, start in parts]),
        "observed": [[example.observed] for example in examples if example.observed is not None],
    }


def _answer_of(fields: Mapping[str, Any], name: str) -> str | list[Message]:
    """Return an answer of a pair; raises RowError unless it is a text or messages."""
    if name not in fields:
        msg = f"it has no field {name!r}, which a row of a pair needs; its fields are {', '.join(fields) or 'none'}"
        raise RowError(msg)
    return checked_prompt(fields[name], f"field {name!r}")[0]


def _check_pair(chosen: Example, rejected: Example) -> None:
    """Check that a pair has one prompt and two answers; raises RowError if it has not."""
    prompt, other = (example.ids[: int(np.argmax(example.trained))] for example in (chosen, rejected))
    if not np.array_equal(prompt, other):
        msg = "chosen and rejected have different prompts; write the same messages before both answers"
        raise RowError(msg)
    if np.array_equal(chosen.ids, rejected.ids):
        msg = "chosen and rejected have the same tokens, as far as they are trained; remove the row"
        raise RowError(msg)
