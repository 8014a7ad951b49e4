"""Examples and pairs from rows of the data: token ids and a mask of the trained ones.

A conversation is rendered by the model's chat template and cut where trained text begins and ends. Each part is
tokenized on its own, as the prompt of a generation is, so that training and generation see the same ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.config import Config
from relax_actors.config.data import DataSection
from relax_actors.data.example import Example, Part, end_between_media
from relax_actors.data.fields import checked_prompt
from relax_actors.data.placeholders import arranged_numbers, with_parts, with_tokens
from relax_actors.data.prompt_maker import MAX_SECONDS, check_size
from relax_actors.data.task import Task
from relax_actors.data.template_spans import has_generation_tags, message_spans, tagged_spans
from relax_actors.data.time_limit import call_within
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError, SlowRowError
from relax_actors.media.family import Family
from relax_actors.messages import NOT_SAMPLED, FinishReason, MediaSource, Prompt, Trajectory
from relax_actors.messages.trajectory import LABEL

Array = NDArray[Any]
Message = dict[str, Any]
ASSISTANT = "assistant"
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
        self._family, self._expand = family, expand
        self._settings, self._data, self._tokenizer = config.examples, data, tokenizer
        self._has_pairs, self._has_labels = (config.algorithm.rows == name for name in ("pairs", "labelled"))
        self._is_half = config.algorithm.compares_answers
        # The answers of a row are in one micro-batch.
        self._most = min(context, config.trainer.max_tokens_per_microbatch // (2 if self._is_half else 1))
        train = config.examples.train
        self._roles: tuple[str, ...] = (ASSISTANT,) if train == "completion" else () if train == "all" else train
        self._stop = np.array(sorted(tokenizer.stop_ids)[:1], np.int32)

    def make(self, row: Prompt) -> Trajectory:
        """Make the trajectory of a row: one sample, or the chosen and the rejected one of a pair.

        Raises:
            RowError: the row lacks an answer, nothing of it is trained, it is too long, its answers are the same, the
                chat template refuses or rewrites its messages, or its media do not fit their placeholders.
            SlowRowError: the chat template or the tokenizer did not end in time.
        """
        label = [1.0 if _label_of(row.metadata) else -1.0, 0.0] if self._has_labels else []
        examples = self._limited([self._with_media(example, row) for example in self.examples(row)])
        if self._has_pairs:
            _check_pair(*examples)
        return self._trajectory(examples, label)

    def examples(self, row: Prompt) -> list[Example]:
        """Return the examples of a row in full length; errors as `make`."""
        if self._chats(row):
            self._tokenizer.formatter  # noqa: B018 loads transformers, which takes longer than a row
        try:
            return call_within(MAX_SECONDS, lambda: [self._example(row, answer) for answer in self._answers(row)])
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
        kinds = {self._family.ids[kind]: kind for kind in self._family.kinds}
        places = [kinds[token] for token in example.ids.tolist() if token in kinds]
        media = [row.media[number] for number in arranged_numbers(places, row.media)]
        return example if self._expand is None else self._expand(example, media)

    def _answers(self, row: Prompt) -> list[str | list[Message]]:
        if self._has_labels and OTHER in row.metadata:
            return [row.answer, row.metadata[OTHER]]
        if not self._has_pairs:
            return [row.answer]
        chosen, rejected = (_answer_of(row.metadata, name) for name in PAIR)
        if chosen == rejected:
            msg = "chosen and rejected are the same; remove the row"
            raise RowError(msg)
        return [chosen, rejected]

    def _chats(self, row: Prompt) -> bool:
        return bool(row.messages) or (self._tokenizer.has_chat_template if self._data.chat is None else self._data.chat)

    def _example(self, row: Prompt, answer: str | list[Message]) -> Example:
        if self._chats(row):
            return self._of_conversation(self._conversation(row, answer), row.metadata.get("tools"))
        if not isinstance(answer, str):
            msg = "its answers are messages, which need a chat template, and the model has none; give texts"
            raise RowError(msg)
        text = self._templated(row.text)
        return self._of_text(text if self._family is None else self._with_markers(text, self._family), answer)

    def _with_markers(self, text: str, family: Family) -> str:
        """Return a text without chat template, with placeholders as the family writes them."""
        return with_tokens(with_parts([{"content": text}])[0]["content"], family, self._tokenizer.inner)

    def _templated(self, text: str) -> str:
        return self._data.template.replace("{prompt}", text)

    def _conversation(self, row: Prompt, answer: str | list[Message]) -> list[Message]:
        said = answer if isinstance(answer, list) else [{"role": ASSISTANT, "content": answer}] if answer else []
        is_whole = bool(said) and said[0]["role"] != ASSISTANT
        asked = row.messages or [{"role": "user", "content": self._templated(row.text)}]
        system = [] if self._data.system is None else [{"role": "system", "content": self._data.system}]
        messages = [*system, *([] if is_whole else asked), *said]
        return messages if self._family is None else with_parts(messages)

    def _of_text(self, prompt: str, answer: str) -> Example:
        """Return the example of a text and its answer, which the stop token ends."""
        trains_all = self._settings.train == "all"
        if not answer and not (trains_all or "user" in self._roles):
            msg = 'it has no answer; set data.fields.answer, or examples.train = "all" to train texts without answers'
            raise RowError(msg)
        parts = [Part(prompt, trains_all or "user" in self._roles, is_answer=not answer)]
        parts += [Part(answer, trains_all or ASSISTANT in self._roles, is_answer=True)] if answer else []
        ids = [self._tokenizer.encode(part.text, special=i == 0) for i, part in enumerate(parts)]
        if not len(ids[-1]) or int(ids[-1][-1]) not in self._tokenizer.stop_ids:
            ids[-1] = np.concatenate([ids[-1], self._stop])
        masks = [np.full(len(own), part.trained) for own, part in zip(ids, parts, strict=True)]
        return Example(np.concatenate(ids), np.concatenate(masks))

    def _of_conversation(self, messages: list[Message], tools: object) -> Example:
        ids, masks = [], []
        for part in self._parts(messages, tools):
            own = self._tokenizer.encode(part.text, special=False)
            mask = np.full(len(own), part.trained)
            if part.is_answer and len(stops := np.flatnonzero(np.isin(own, list(self._tokenizer.stop_ids)))):
                mask[stops[0] + 1 :] = False
            ids.append(own)
            masks.append(mask)
        return Example(np.concatenate(ids).astype(np.int32), np.concatenate(masks))

    def _parts(self, messages: list[Message], tools: object) -> list[Part]:
        """Return a rendered conversation, cut where trained text begins and ends."""
        wanted = self._trained_messages(messages)
        messages = [{name: value for name, value in m.items() if name != "train"} for m in messages]
        if all(wanted):
            return [Part(self._tokenizer.chat(messages, asks=False, tools=tools), trained=True)]
        roles = {message["role"] for message, is_wanted in zip(messages, wanted, strict=True) if is_wanted}
        if roles <= {ASSISTANT} and has_generation_tags(self._tokenizer.chat_template):
            text, spans = tagged_spans(self._tokenizer, messages, tools)
        else:
            text, spans = message_spans(self._tokenizer, messages, wanted, tools)
        parts, at = [], 0
        for span, message, is_wanted in zip(spans, messages, wanted, strict=True):
            if is_wanted and span is not None:
                parts.append(Part(text[at : span[0]], trained=False))
                parts.append(Part(text[slice(*span)], trained=True, is_answer=message["role"] == ASSISTANT))
                at = span[1]
        return [*parts, Part(text[at:], trained=False)]

    def _trained_messages(self, messages: Sequence[Message]) -> list[bool]:
        """Return whether each message is trained: what it says itself, or else what `examples.train` says."""
        train, last = self._settings.train, len(messages) - 1
        if train == "completion" and messages[last]["role"] != ASSISTANT:
            msg = f"the conversation ends with a message of the role {messages[last]['role']!r}, and it has no answer"
            raise RowError(msg)
        by_setting = [
            train == "all" or (i == last if train == "completion" else message["role"] in self._roles)
            for i, message in enumerate(messages)
        ]
        return [bool(m.get("train", chosen)) for m, chosen in zip(messages, by_setting, strict=True)]

    def _limited(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples of a row as they fit the model and a micro-batch, without what follows trained tokens.

        Their beginnings are cut off by the same number of tokens, so that answers keep their prompt in common.

        Raises:
            RowError: one does not fit, or none of its tokens is trained.
        """
        longest, most, oversize = max(len(example.ids) for example in examples), self._most, self._data.oversize
        if longest > most and oversize in ("skip", "keep"):
            half = ", half of which is for the other answer" if self._is_half else ""
            msg = (
                f"it has {longest} tokens, more than the {most} of the model's context or of "
                f"trainer.max_tokens_per_microbatch{half}; raise that, or set data.oversize to cut rows off"
            )
            raise RowError(msg)
        begin = max(0, longest - most) if oversize == "truncate_left" else 0
        return [self._cut(example.since(begin)) for example in examples]

    def _cut(self, example: Example) -> Example:
        """Return an example that ends with its last trained token, among the first `_most`, and not within a medium."""
        trained = example.trained.copy()
        trained[:1] = False  # no token before it
        most, is_cut = self._most, example.is_cut or len(example.ids) > self._most
        if is_cut and example.observed is not None:
            most = end_between_media(example.ids, example.observed, most)
        if not trained[:most].any():
            where = f" among the {'last' if example.is_cut else 'first'} {most}" if is_cut else ""
            msg = f"none of its tokens is trained{where}; correct the row, or set examples.train"
            raise RowError(msg)
        end = int(np.flatnonzero(trained[:most])[-1]) + 1
        return replace(example, trained=trained).until(end, is_cut=is_cut)

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
        return Trajectory(
            prompt_tokens=examples[0].ids[:prompt],
            lengths=np.array([len(example.ids) - prompt for example in examples], np.int32),
            token_ids=own,
            logprobs=np.zeros(len(own), np.float32),
            versions=np.full(len(own), NOT_SAMPLED, np.int32),
            texts=[self._tokenizer.decode(example.ids[example.trained]) for example in examples],
            finish_reasons=[(FinishReason.LENGTH if e.is_cut else FinishReason.STOP).value for e in examples],
            loss_mask=np.concatenate([example.trained[prompt:] for example in examples]),
            metrics={LABEL: [*label[: len(examples)]]} if label else {},
            observed=[[e.observed] for e in examples if e.observed is not None],
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


def _label_of(fields: Mapping[str, Any]) -> bool:
    """Return whether a labelled answer is good.

    Raises:
        RowError: the row does not say it.
    """
    label = fields.get(LABEL)
    if not isinstance(label, bool):
        msg = f"its field 'label' is {label!r:.60}; write true for a good answer, and false for a bad one"
        raise RowError(msg)
    return label


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
