"""Cut a part of a prompt that is too long; the text around it stays whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.task import Task
from relax_actors.data.tokenizer import Tokenizer

CUT = "cut_tokens"
"""Field of the metadata of a row whose prompt was cut off: number of tokens that it lost."""
_TRIES = 8
"""Cuts of a prompt: tokens at a cut may merge with the text around it in another way."""
Rendered = tuple[str, NDArray[np.int32]]


def cut_to(
    task: Task, room: int, *, left: bool, tokenizer: Tokenizer, render: Callable[[Task], Rendered]
) -> tuple[Task, Rendered] | None:
    """Cut a prompt, or the user's longest message, until it has `room` tokens at most.

    The text loses its beginning if `left`, else its end. `render` returns text and tokens of a task's prompt.

    Returns:
        The task and its rendered prompt; None if the text has too few tokens, or the prompt has media.
    """
    text, tokens = render(task)
    whole = len(tokens)
    for _ in range(_TRIES):
        if len(tokens) <= room:
            return replace(task, metadata=task.metadata | {CUT: whole - len(tokens)}), (text, tokens)
        shorter = None if task.media else _cut(task, len(tokens) - room, left, tokenizer)
        if shorter is None:
            return None
        task = shorter
        text, tokens = render(task)
    return None


def _cut(task: Task, count: int, left: bool, tokenizer: Tokenizer) -> Task | None:  # noqa: FBT001 as given to `cut_to`
    if isinstance(task.prompt, str):
        shorter = _without(task.prompt, count, left, tokenizer)
        return None if shorter is None else replace(task, prompt=shorter)
    texts = {
        i: message["content"]
        for i, message in enumerate(task.prompt)
        if message["role"] == "user" and isinstance(message["content"], str)
    }
    if not texts:
        return None
    longest = max(texts, key=lambda i: len(texts[i]))
    shorter = _without(texts[longest], count, left, tokenizer)
    if shorter is None:
        return None
    messages = [*task.prompt]
    messages[longest] = {**messages[longest], "content": shorter}
    return replace(task, prompt=messages)


def _without(text: str, count: int, left: bool, tokenizer: Tokenizer) -> str | None:  # noqa: FBT001
    """Return a text without its first or last tokens; None if it has no more than these."""
    offsets = tokenizer.inner.encode(text, add_special_tokens=False).offsets
    if count >= len(offsets):
        return None
    shorter = text[offsets[count][0] :] if left else text[: offsets[-count - 1][1]]
    return shorter if shorter.strip() else None
