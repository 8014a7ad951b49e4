"""Tokens of a prompt with its answer, and a mask of the trained ones.

A conversation is rendered by the model's chat template and cut where trained text begins and ends. Each part is
tokenized on its own, as the prompt of a generation is, so that training and generation see the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.config.data import DataSection
from relax_actors.config.pools import ExamplesSection
from relax_actors.data.example import Example, Part
from relax_actors.data.placeholders import with_parts, with_tokens
from relax_actors.data.template_spans import has_generation_tags, message_spans, tagged_spans
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError
from relax_actors.media.family import Family
from relax_actors.messages import Prompt

Array = NDArray[Any]
Message = dict[str, Any]
ASSISTANT = "assistant"
PLACEHOLDER = "SAMPLED7ANSWER"
"""Stands for an answer where only what a chat template writes before it counts."""


class AnswerTokens:
    """Tokenizes prompts with their answers.

    Args:
        tokenizer: of the model.
        settings: section [examples] of the run.
        data: section of the source, with the system message and the template of its texts; None for texts and messages
            that have both.
        family: of a model that sees or hears.
        any_text: whether answers are samples: characters that the tokenizer does not know are spelled in another way,
            and steps need not be what the chat template would write of them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: ExamplesSection,
        data: DataSection | None = None,
        family: Family | None = None,
        *,
        any_text: bool = False,
    ) -> None:
        self._any_text = any_text
        self._encode = tokenizer.encode_any if any_text else tokenizer.encode
        self._settings, self._tokenizer, self._family = settings, tokenizer, family
        self._template, self._system = ("{prompt}", None) if data is None else (data.template, data.system)
        self._chat = False if data is None else data.chat
        train = settings.train
        self._roles: tuple[str, ...] = (ASSISTANT,) if train == "completion" else () if train == "all" else train
        self._stop = np.array(sorted(tokenizer.stop_ids)[:1], np.int32)

    def example(self, prompt: Prompt, answer: str | list[Message], *, may_be_empty: bool = False) -> Example:
        """Return the tokens of a prompt with its answer.

        Args:
            prompt: a text or messages, perhaps with `tools` in its metadata.
            answer: a text, messages of the assistant, or a whole conversation.
            may_be_empty: whether an empty answer is one, which has its stop token alone.

        Raises:
            RowError: the prompt has no answer, or the chat template refuses or rewrites the messages.
        """
        if self.chats(prompt):
            whole = self._conversation(prompt, answer, may_be_empty=may_be_empty)
            return self._of_conversation(whole, prompt.metadata.get("tools"))
        if not isinstance(answer, str):
            msg = "its answers are messages, which need a chat template, and the model has none; give texts"
            raise RowError(msg)
        return self._of_text(self._marked(prompt.text), answer, may_be_empty=may_be_empty)

    def steps(self, prompt: Prompt, steps: Sequence[str], targets: Sequence[float]) -> Example:
        """Return the tokens of a prompt with an answer in steps, each with its separator behind it.

        Steps and separators are tokenized one by one, as TRL does for process reward models, so that a separator has
        the same tokens behind every step. A score is read at the last of them.

        Args:
            prompt: a text or messages.
            steps: `[steps]`, texts of the steps, without separators.
            targets: `[steps]`, what their scores are compared with.

        Raises:
            RowError: the chat template refuses the messages, or does not write the steps as they are.
        """
        separator = self._settings.step_separator
        parts = self._before(prompt, "".join(step + separator for step in steps))
        special = not self.chats(prompt)
        ids = [self._encode(text, special=special and not i) for i, text in enumerate(parts)]
        begin, end = sum(map(len, ids)), self._encode(separator, special=False)
        places = []
        for step in steps:
            ids += [self._encode(step, special=False), end]
            places.append(sum(map(len, ids)) - 1)
        whole = np.concatenate(ids).astype(np.int32)
        values = np.full(len(whole), np.nan, np.float32)
        values[places] = targets
        return Example(whole, np.arange(len(whole)) >= begin, targets=values)

    def _before(self, prompt: Prompt, answer: str) -> list[str]:
        """Return the texts before an answer, which are tokenized one by one."""
        if not self.chats(prompt):
            return [self._templated(prompt.text)]
        answer = PLACEHOLDER if self._any_text else answer
        parts = self._parts(self._conversation(prompt, answer), prompt.metadata.get("tools"))
        last = max((i for i, part in enumerate(parts) if part.trained), default=0)
        at = parts[last].text.find(answer)
        if at < 0:
            msg = (
                f"the chat template does not write its steps as they are, each with {self._settings.step_separator!r} "
                "behind it (it may strip white space); choose another examples.step_separator"
            )
            raise RowError(msg)
        return [text for text in (*(part.text for part in parts[:last]), parts[last].text[:at]) if text]

    def chats(self, prompt: Prompt) -> bool:
        """Whether a prompt is rendered by the chat template."""
        return bool(prompt.messages) or (self._tokenizer.has_chat_template if self._chat is None else self._chat)

    def _marked(self, text: str) -> str:
        """Return a prompt's text without chat template, with the family's placeholders."""
        text = self._templated(text)
        if self._family is None:
            return text
        return with_tokens(with_parts([{"content": text}])[0]["content"], self._family, self._tokenizer.inner)

    def _templated(self, text: str) -> str:
        return self._template.replace("{prompt}", text)

    def _conversation(
        self, prompt: Prompt, answer: str | list[Message], *, may_be_empty: bool = False
    ) -> list[Message]:
        text = [{"role": ASSISTANT, "content": answer}] if answer or may_be_empty else []
        said = answer if isinstance(answer, list) else text
        is_whole = bool(said) and said[0]["role"] != ASSISTANT
        before = prompt.messages or [{"role": "user", "content": self._templated(prompt.text)}]
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        messages = [*system, *([] if is_whole else before), *said]
        return messages if self._family is None else with_parts(messages)

    def _of_text(self, prompt: str, answer: str, *, may_be_empty: bool) -> Example:
        """Return the example of a text and its answer, which the stop token ends."""
        trains_all = self._settings.train == "all"
        is_answered = bool(answer) or may_be_empty
        if not is_answered and not (trains_all or "user" in self._roles):
            msg = (
                'it has no answer; set data.fields.answer, or algorithm.name = "sft" with examples.train = "all" to '
                "train texts without answers"
            )
            raise RowError(msg)
        parts = [Part(prompt, trains_all or "user" in self._roles, is_answer=not is_answered)]
        parts += [Part(answer, trains_all or ASSISTANT in self._roles, is_answer=True)] if is_answered else []
        ids = [self._encode(part.text, special=i == 0) for i, part in enumerate(parts)]
        if not len(ids[-1]) or int(ids[-1][-1]) not in self._tokenizer.stop_ids:
            ids[-1] = np.concatenate([ids[-1], self._stop])
        masks = [np.full(len(own), part.trained) for own, part in zip(ids, parts, strict=True)]
        return Example(np.concatenate(ids), np.concatenate(masks))

    def _of_conversation(self, messages: list[Message], tools: object) -> Example:
        ids, masks = [], []
        for part in self._parts(messages, tools):
            own = self._encode(part.text, special=False)
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
        """Return whether each message is trained, by itself or by `examples.train`."""
        train, last = self._settings.train, len(messages) - 1
        if train == "completion" and messages[last]["role"] != ASSISTANT:
            msg = f"the conversation ends with a message of the role {messages[last]['role']!r}, and it has no answer"
            raise RowError(msg)
        by_setting = [
            train == "all" or (i == last if train == "completion" else message["role"] in self._roles)
            for i, message in enumerate(messages)
        ]
        return [bool(m.get("train", chosen)) for m, chosen in zip(messages, by_setting, strict=True)]
