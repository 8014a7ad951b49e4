"""Prompts made from tasks: template, chat template, tokens, and the check that they fit the model."""

from __future__ import annotations

from typing import Any

from relax_actors.config.schema import Config, DataSection
from relax_actors.data.model_folder import measure
from relax_actors.data.sources import PromptSource as Source
from relax_actors.data.sources import open_source
from relax_actors.data.task import Task
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError
from relax_actors.messages import Prompt


def open_data(data: DataSection) -> Source:
    """The source of a [data] section.

    Raises:
        ConfigError: it cannot be opened, or holds not one good row.
    """
    fields = ("path", "task", "function", "size", "seed", "options", "prompt_field", "answer_field")
    return open_source(data.kind, **{name: getattr(data, name) for name in fields})


def room(config: Config) -> int:
    """Tokens that a sequence may have: the model's context, and what the trainer takes at once."""
    return min(measure(config.model_path).context_length, config.trainer.max_tokens_per_microbatch)


class PromptMaker:
    """Turns tasks into prompts: template, chat, tokens, and the check that they fit the model."""

    def __init__(self, data: DataSection, tokenizer: Tokenizer, whole: int, max_tokens: int) -> None:
        self._data, self._tokenizer = data, tokenizer
        self._room = whole - max_tokens
        self._whole, self._max_tokens = whole, max_tokens

    def make(self, task: Task, **fields: Any) -> Prompt:
        """The prompt of a task.

        Raises:
            RowError: it is too long for the model's context, or has no tokens.
        """
        text = self.text(task)
        chat = not isinstance(task.prompt, str) or self._chats
        tokens = self._tokenizer.encode(text, special=not chat)
        if len(tokens) > self._room or not len(tokens):
            msg = (
                f"prompt {text[:60]!r} has {len(tokens)} tokens; sequences of up to {self._whole} (the "
                f"context, or trainer.max_tokens_per_microbatch) leave 1 to {self._room} beside "
                f"rollout.max_tokens = {self._max_tokens}"
            )
            raise RowError(msg)
        return Prompt(text, tokens, task.answer, task.metadata, **fields)

    @property
    def _chats(self) -> bool:
        return self._tokenizer.has_chat_template if self._data.chat is None else self._data.chat

    def text(self, task: Task) -> str:
        """What the model reads."""
        messages = task.prompt
        if isinstance(messages, str):
            text = self._data.template.replace("{prompt}", messages)
            if not self._chats:
                return text
            messages = [{"role": "user", "content": text}]
        if self._data.system is not None:
            messages = [{"role": "system", "content": self._data.system}, *messages]
        return self._tokenizer.chat(messages)
