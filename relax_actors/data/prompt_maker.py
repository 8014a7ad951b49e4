"""Make prompts from tasks: template, chat template, tokens, and a check of their length."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from broker.codec import MAX_CELL_BYTES
from relax_actors.config import Config
from relax_actors.config.data import DataSection
from relax_actors.data.model_folder import measure
from relax_actors.data.source import DataSource
from relax_actors.data.sources import open_source
from relax_actors.data.task import Task
from relax_actors.data.time_limit import call_within
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError, SlowRowError
from relax_actors.messages import Prompt

MAX_SECONDS = 10.0
"""Time to format and tokenize one prompt."""
MAX_PROMPT_BYTES = MAX_CELL_BYTES - (64 << 10)
"""Size of a prompt with its answer and metadata; the rest of a cell is for its other fields."""


def open_data(data: DataSection) -> DataSource:
    """Open the source of a [data] section.

    Raises:
        ConfigError: it cannot be opened, or has not one usable row.
    """
    fields = ("path", "task", "function", "size", "seed", "options", "prompt_field", "answer_field")
    return open_source(data.kind, **{name: getattr(data, name) for name in fields})


def room(config: Config) -> int:
    """Maximum tokens of a sequence: the model's context, or the trainer's micro-batch if that is smaller."""
    return min(measure(config.model_path).context_length, config.trainer.max_tokens_per_microbatch)


class PromptMaker:
    """Makes prompts from tasks.

    Args:
        data: the section of the source.
        tokenizer: of the model.
        whole: maximum tokens of a sequence; see `room`.
        max_tokens: maximum tokens of a completion, which the prompt must leave room for.
    """

    def __init__(self, data: DataSection, tokenizer: Tokenizer, whole: int, max_tokens: int) -> None:
        self._data, self._tokenizer = data, tokenizer
        self._room = whole - max_tokens
        self._whole, self._max_tokens = whole, max_tokens

    def make(self, task: Task, **fields: Any) -> Prompt:
        """Make the prompt of a task.

        Args:
            task: to make it from.
            fields: further fields of the cell, such as seed and min_version.

        Raises:
            RowError: it is too long, has no tokens, has a character that the tokenizer does not know, takes too long,
                or the chat template refuses it; names the row of the data.
        """
        text, tokens = self._text_and_tokens(task)
        self._check_size(task, text)
        if not len(tokens):
            msg = f"{_origin(task)}prompt {text[:60]!r} has no tokens; write a prompt or remove the row"
            raise RowError(msg)
        if len(tokens) > self._room:
            msg = (
                f"{_origin(task)}prompt {text[:60]!r} has {len(tokens)} tokens, more than the {self._room} that "
                f"rollout.max_tokens = {self._max_tokens} leaves of {self._whole} (the model's context, or "
                "trainer.max_tokens_per_microbatch if that is smaller); shorten the prompt or lower rollout.max_tokens"
            )
            raise RowError(msg)
        return Prompt(text, tokens, task.answer, task.metadata, **fields)

    def _text_and_tokens(self, task: Task) -> tuple[str, NDArray[np.int32]]:
        """Format and tokenize a prompt within `MAX_SECONDS`: the template and the patterns of a tokenizer may loop."""
        chat = not isinstance(task.prompt, str) or self._chats
        if chat:
            self._tokenizer.formatter  # noqa: B018 loads transformers, which takes longer than a prompt

        def make() -> tuple[str, NDArray[np.int32]]:
            text = self.text(task)
            if len(text) > MAX_PROMPT_BYTES:
                return text, np.empty(0, np.int32)  # refused below, and not worth the time
            return text, self._tokenizer.encode(text, special=not chat)

        try:
            return call_within(MAX_SECONDS, make)
        except TimeoutError as error:
            what = "the chat template and the tokenizer" if chat else "the tokenizer"
            msg = f"{_origin(task)}prompt: {what} did not end within {MAX_SECONDS:g} s; fix them or remove the row"
            raise SlowRowError(msg) from error
        except (RowError, RuntimeError) as error:
            msg = f"{_origin(task)}prompt: {error}"
            raise RowError(msg) from error

    def _check_size(self, task: Task, text: str) -> None:
        """Raise RowError if prompt, answer and metadata do not fit into a cell."""
        size = 0
        with suppress(TypeError, ValueError, OverflowError):  # no plain data, which the codec refuses
            size = len(msgpack.packb([text, task.answer, task.metadata]))
        if size > MAX_PROMPT_BYTES:
            msg = (
                f"{_origin(task)}prompt, answer and metadata have {size} bytes, more than the {MAX_PROMPT_BYTES} that "
                "a cell holds; remove fields that the reward does not need"
            )
            raise RowError(msg)

    @property
    def _chats(self) -> bool:
        return self._tokenizer.has_chat_template if self._data.chat is None else self._data.chat

    def text(self, task: Task) -> str:
        """Text that the model reads."""
        messages = task.prompt
        if isinstance(messages, str):
            text = self._data.template.replace("{prompt}", messages)
            if not self._chats:
                return text
            messages = [{"role": "user", "content": text}]
        if self._data.system is not None:
            messages = [{"role": "system", "content": self._data.system}, *messages]
        return self._tokenizer.chat(messages)


def _origin(task: Task) -> str:
    return f"{task.origin}: " if task.origin else ""
