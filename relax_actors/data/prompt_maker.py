"""Make prompts from tasks: template, chat template, tokens, and a check of their length."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from broker.codec import MAX_CELL_BYTES
from broker.store import Store
from broker.subjects import RowId
from relax_actors.config import Config
from relax_actors.config.data import DataSection
from relax_actors.config.media import MediaSection
from relax_actors.config.sources import SourceSection
from relax_actors.data.model_folder import measure
from relax_actors.data.oversize import Rendered, cut_to
from relax_actors.data.placeholders import PLACEHOLDER, arrange, kinds_of, with_parts, with_tokens
from relax_actors.data.source import DataSource
from relax_actors.data.sources import open_source
from relax_actors.data.task import Medium, Task
from relax_actors.data.time_limit import call_within
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError, SlowRowError
from relax_actors.messages import MediaSource, Prompt

if TYPE_CHECKING:
    from relax_actors.data.media_admission import MediaAdmission

MAX_SECONDS = 10.0
"""Time to format and tokenize one prompt."""
MAX_PROMPT_BYTES = MAX_CELL_BYTES - (64 << 10)
"""Size of a prompt with its answer and metadata; the rest of a cell is for its other fields."""


def open_data(data: DataSection, media: MediaSection | None = None) -> DataSource:
    """Open the source of a [data] section; `media` is the section [media].

    Raises:
        ConfigError: it cannot be opened, or has not one usable row.
    """
    mixture = {name: part.model_dump(exclude={"weight"}) for name, part in data.mixture.items()}
    own = {name: getattr(data, name) for name in SourceSection.model_fields}
    media_bytes = 0 if media is None else media.limits.max_bytes
    return open_source(**own, mixture=mixture, media_bytes=media_bytes)


def room(config: Config) -> int:
    """Maximum tokens of a sequence: the model's context, or the trainer's micro-batch."""
    return min(measure(config.model_path).context_length, config.trainer.max_tokens_per_microbatch)


def admission_of(config: Config, store: Store | None = None, folder: Path | None = None) -> MediaAdmission | None:
    """Return the admission of media of a run; None for a model of text alone.

    Without a store, media that the data holds itself are only checked. `folder` is the model folder, by default that of
    the configuration. Raises ConfigError if the model is not supported.
    """
    if config.media is None:
        return None
    from relax_actors.data.media_admission import MediaAdmission  # noqa: PLC0415 no part of a run with text alone

    return MediaAdmission(config.media, folder or config.model_path, store)


def tokens_left(data: DataSection, max_tokens: int) -> tuple[int, str]:
    """Return the tokens that a prompt must leave for its completion, and their purpose."""
    if data.oversize == "keep":
        return 1, "the completion's first token"
    return max_tokens, f"rollout.max_tokens = {max_tokens}"


def check_size(task: Task, prompt: object) -> None:
    """Check that a prompt fits into a cell; raises RowError."""
    size = 0
    with suppress(TypeError, ValueError, OverflowError):  # no plain data, which the codec refuses
        size = len(msgpack.packb([prompt, task.answer, task.metadata]))
    if size > MAX_PROMPT_BYTES:
        msg = (
            f"{_origin(task)}prompt, answer and metadata have {size} bytes, more than the {MAX_PROMPT_BYTES} that "
            "a cell holds; remove fields that the reward does not need"
        )
        raise RowError(msg)


class PromptMaker:
    """Makes prompts from tasks.

    Args:
        data: the section of the source.
        tokenizer: of the model.
        whole: maximum tokens of a sequence; see `room`.
        max_tokens: maximum tokens of a completion, which the prompt must leave room for.
        admission: of media; None for a model of text alone.
        keeps_messages: whether prompts hold their chat messages, which episodes continue.
    """

    def __init__(
        self,
        data: DataSection,
        tokenizer: Tokenizer,
        whole: int,
        max_tokens: int,
        admission: MediaAdmission | None = None,
        *,
        keeps_messages: bool = False,
    ) -> None:
        self._keeps_messages = keeps_messages
        self._data, self._tokenizer, self._admission = data, tokenizer, admission
        left, self._left_by = tokens_left(data, max_tokens)
        self._whole, self._room = whole, whole - left

    def make(self, task: Task, row: RowId | None = None, **fields: Any) -> Prompt:
        """Make the prompt of a task.

        Args:
            task: to make it from.
            row: its row, whose step keeps media that the data holds itself; None if the prompt is for no row.
            fields: further fields of the cell, such as seed and min_version.

        Raises:
            RowError: it is too long, has no tokens, has a character that the tokenizer does not know, takes too long,
                or the chat template refuses it; its media do not fit its placeholders, the model or [media]; names the
                row of the data.
        """
        task = self._without_messages(task)
        self._check_media(task)
        text, tokens = self._text_and_tokens(task)
        check_size(task, text)
        if not len(tokens):
            msg = f"{_origin(task)}prompt {text[:60]!r} has no tokens; write a prompt or remove the row"
            raise RowError(msg)
        if len(tokens) > self._room:
            task, (text, tokens) = self._cut(task, text, tokens)
        if self._admission is not None:
            media = self._media(task, tokens)
            fields["media"] = self._admission.sources(media, row, task.origin or "a task")
        if self._keeps_messages:
            fields["messages"] = self._chat_of(task) or []
        return Prompt(text, tokens, task.answer, task.metadata, **fields)

    def _cut(self, task: Task, text: str, tokens: NDArray[np.int32]) -> tuple[Task, Rendered]:
        """Cut a long prompt; raises RowError if `data.oversize` forbids it, or it is impossible."""
        oversize = self._data.oversize
        if oversize in ("truncate_left", "truncate_right"):
            left = oversize == "truncate_left"
            cut = cut_to(task, self._room, left=left, tokenizer=self._tokenizer, render=self._text_and_tokens)
            if cut is not None:
                return cut
        msg = (
            f"{_origin(task)}prompt {text[:60]!r} has {len(tokens)} tokens, more than the {self._room} that "
            f"{self._left_by} leaves of {self._whole} (the model's context, or trainer.max_tokens_per_microbatch if "
            "that is smaller); shorten the prompt, lower rollout.max_tokens, or set data.oversize"
        )
        raise RowError(msg)

    def media_of(self, task: Task, row: RowId | None = None) -> list[MediaSource]:
        """Return the media of a task in their order in the data.

        The step of the row keeps media that the data holds itself; without a row they are only checked.

        Raises:
            RowError: the model does not take them, or they may not be used.
        """
        where = task.origin or "a task"
        if self._admission is None:
            self._check_media(task)
            return []
        self._admission.check_kinds(task.media, where)
        return self._admission.sources([self._with_options(medium) for medium in task.media], row, where)

    def _without_messages(self, task: Task) -> Task:
        """Return a task with a text as prompt if the model has no chat template.

        Raises:
            RowError: the prompt has several messages, or one that is not the user's.
        """
        messages = task.prompt
        if isinstance(messages, str) or self._tokenizer.has_chat_template:
            return task
        if [message.get("role") for message in messages] != ["user"]:
            msg = (
                f"{_origin(task)}a chat of {len(messages)} messages needs a chat template, and the model has none; add "
                "chat_template.jinja to its folder, or give a text or a single message of the user"
            )
            raise RowError(msg)
        content = messages[0]["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        return replace(task, prompt="".join(part.get("text", f"<{part['type']}>") for part in parts))

    def _check_media(self, task: Task) -> None:
        """Raise RowError unless the model takes a task's media, one for each placeholder."""
        if self._admission is None:
            if task.media:
                kind = task.media[0].kind
                msg = f"{_origin(task)}the prompt has {kind}, but the model takes text alone; remove the row"
                raise RowError(msg)
            return
        if task.media or self._has_placeholders(task):
            self._admission.check_kinds(task.media, task.origin or "a task")
            try:
                arrange(kinds_of(self._messages(task)), task.media)
            except RowError as error:
                msg = f"{_origin(task)}{error}"
                raise RowError(msg) from error

    def _media(self, task: Task, tokens: NDArray[np.int32]) -> list[Medium]:
        """Return the media of a task in the order of their placeholders among the tokens."""
        if self._admission is None:
            return []
        ids = self._admission.family.kinds_by_id
        placeholders = [ids[token] for token in tokens[np.isin(tokens, list(ids))].tolist()]
        wanted = kinds_of(self._messages(task)) if task.media else []
        if placeholders != wanted:
            what = f"{len(placeholders)} placeholders ({', '.join(placeholders[:8]) or 'none'})"
            msg = (
                f"{_origin(task)}the prompt has {what} for media after tokenization, but its row has {len(wanted)} "
                f"({', '.join(wanted[:8]) or 'none'}); write each as <image>, <video>, <audio> or a content part"
            )
            raise RowError(msg)
        return [self._with_options(medium) for medium in arrange(placeholders, task.media)]

    def _with_options(self, medium: Medium) -> Medium:
        """Add the settings of the data set to those of a medium."""
        options = {str(kind): own for kind, own in self._data.media.items()}
        return replace(medium, options=options.get(medium.kind, {}) | medium.options)

    def _messages(self, task: Task) -> list[dict[str, Any]]:
        """Return the prompt as messages, with its placeholders as content parts."""
        messages = task.prompt if isinstance(task.prompt, list) else [{"role": "user", "content": task.prompt}]
        return with_parts(messages)

    def _text_and_tokens(self, task: Task) -> tuple[str, NDArray[np.int32]]:
        """Format and tokenize a prompt within `MAX_SECONDS`: templates and patterns may loop."""
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

    @property
    def _chats(self) -> bool:
        return self._tokenizer.has_chat_template if self._data.chat is None else self._data.chat

    def text(self, task: Task) -> str:
        """Text that the model reads."""
        messages = self._chat_of(task)
        if messages is not None:
            return self._tokenizer.chat(messages)
        text = self._templated(str(task.prompt))
        if self._admission is not None and (task.media or self._has_placeholders(task)):
            return self._with_markers(with_parts([{"role": "user", "content": text}])[0]["content"])
        return text

    def _chat_of(self, task: Task) -> list[dict[str, Any]] | None:
        """Return the messages that a chat template formats; None if the prompt is plain text."""
        if isinstance(task.prompt, str):
            if not self._chats:
                return None
            messages = [{"role": "user", "content": self._templated(task.prompt)}]
        else:
            messages = task.prompt
        if self._admission is not None and (task.media or self._has_placeholders(task)):
            messages = with_parts(messages)
        if self._data.system is not None:
            messages = [{"role": "system", "content": self._data.system}, *messages]
        return messages

    def _templated(self, prompt: str) -> str:
        return self._data.template.replace("{prompt}", prompt)

    def _has_placeholders(self, task: Task) -> bool:
        contents = [task.prompt] if isinstance(task.prompt, str) else [m["content"] for m in task.prompt]
        return any(not isinstance(text, str) or PLACEHOLDER.search(text) for text in contents)

    def _with_markers(self, parts: list[dict[str, str]]) -> str:
        """Return content parts as the family's text, where there is no chat template."""
        if self._admission is None:
            return "".join(part["text"] for part in parts if part["type"] == "text")
        return with_tokens(parts, self._admission.family, self._tokenizer.inner)


def _origin(task: Task) -> str:
    return f"{task.origin}: " if task.origin else ""
