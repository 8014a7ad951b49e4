"""Make tasks from the fields of a row, with the checks that all data sources share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.codec import MAX_CELL_BYTES
from relax_actors.data.field_names import FieldNames, listed
from relax_actors.data.media_fields import content_parts, side_media
from relax_actors.data.plain import plain
from relax_actors.data.task import Medium, Task
from relax_actors.errors import RowError

MAX_ROW_BYTES = MAX_CELL_BYTES
"""Size of a row in a file. Larger ones fit into no cell, and decoding some kilobytes of a file can take gigabytes."""
ROLES = {"human": "user", "gpt": "assistant"}
"""Names of ShareGPT for roles."""
_KINDS: dict[str, type] = {"train": bool, "tool_calls": list}
"""Types of the fields of a message that are no text."""


def check_index(i: int, size: int) -> None:
    """Raise IndexError unless `0 <= i < size`."""
    if not 0 <= i < size:
        msg = f"item {i} of a source of {size}"
        raise IndexError(msg)


@dataclass(frozen=True, slots=True)
class RowFields:
    """Where the rows of a file hold what a task needs.

    Attributes:
        names: names of its fields.
        folder: folder that the paths of media start from.
        media_bytes: most bytes of media in a row; 0 if rows have no fields with media.
    """

    names: FieldNames
    folder: Path
    media_bytes: int = 0

    @property
    def max_bytes(self) -> int:
        """Most bytes of a row; media may be written in base64."""
        return MAX_ROW_BYTES + self.media_bytes // 3 * 4


def task_of(row: object, where: str, fields: RowFields) -> Task:
    """Make the task of a row of a file; all fields but prompt, answer and media become metadata.

    Raises:
        RowError: the row is not an object, or its prompt is missing, empty or of the wrong type.
    """
    media: tuple[Medium, ...] = ()
    if not isinstance(row, dict):
        msg = f"{where}: {_kind(row)}, not an object; write {{{json.dumps(fields.names.prompt)}: ...}}"
        raise RowError(msg)
    rest = fields.names.renamed(row)
    if "prompt" not in rest:
        msg = f"{where}: {fields.names.without_prompt(row)}"
        raise RowError(msg)
    prompt, answer = rest.pop("prompt"), rest.pop("answer", None)
    if fields.media_bytes:
        rest, media = side_media(rest, fields.folder, where)
    try:
        answer, metadata = plain(answer), plain(rest)
    except RecursionError:
        msg = f"{where}: nested too deeply; flatten the row"
        raise RowError(msg) from None
    checked, own = checked_prompt(prompt, f"{where}, field {fields.names.prompt!r}", fields.folder)
    return Task(checked, _text(answer), metadata, where, (*media, *own))


def checked_prompt(
    prompt: object, where: str, folder: Path | None = None
) -> tuple[str | list[dict[str, Any]], tuple[Medium, ...]]:
    """Return a prompt that is a text or a chat, and not empty, and the media in its messages.

    Args:
        prompt: the prompt of a row.
        where: origin of the row, for errors.
        folder: folder that the paths of media start from.

    Raises:
        RowError: it is neither, or empty.
    """
    if type(prompt) is str and prompt.isascii() and prompt.strip():  # as most prompts are
        return prompt, ()
    media: list[Medium] = []
    if isinstance(prompt, str):
        contents = [prompt]
        chat: str | list[dict[str, Any]] = prompt
    elif isinstance(prompt, list):
        chat = [_message(message, folder, media, f"{where}, message {i}") for i, message in enumerate(prompt, 1)]
        contents = [text for message in chat for text in _texts(message["content"])]
    else:
        msg = f"{where}: {_kind(prompt)}, neither a text nor a list of messages; correct the row"
        raise RowError(msg)
    if not media and not any(content.strip() for content in contents):
        msg = f"{where}: empty; write a prompt or remove the row"
        raise RowError(msg)
    if any(not content.isascii() and content != plain(content) for content in contents):
        msg = f"{where}: half a surrogate pair, which no tokenizer accepts; write the whole character"
        raise RowError(msg)
    return chat, tuple(media)


def _texts(content: str | list[dict[str, str]]) -> list[str]:
    """Texts of a message's content."""
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def _message(message: object, folder: Path | None, media: list[Medium], where: str) -> dict[str, Any]:
    """Return a checked message; adds the media of its content to `media`."""
    if isinstance(message, dict):
        present = {key: value for key, value in _renamed(message).items() if value is not None}
        if isinstance(present.get("tool_calls"), list):
            present = {"content": ""} | present
        content = present.get("content")
        parts = content if isinstance(content, list) and all(isinstance(part, dict) for part in content) else []
        if parts and isinstance(present.get("role"), str):
            parts, part_media = content_parts(parts, folder, where)
            media += part_media
            only_text = all(part["type"] == "text" for part in parts)
            return present | {"content": "".join(_texts(parts)) if only_text else parts}
        if {"role", "content"} <= present.keys() and all(
            isinstance(value, _KINDS.get(key, str)) for key, value in present.items()
        ):
            return present
    msg = f"{where}: {_kind(message)} that is not {{'role': text, 'content': text}}; correct the message"
    raise RowError(msg)


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message under the usual names, if it has those of ShareGPT."""
    role = message.get("from")
    if not isinstance(role, str) or "value" not in message or "role" in message:
        return message
    rest = {name: value for name, value in message.items() if name not in ("from", "value")}
    return rest | {"role": ROLES.get(role, role), "content": message["value"]}


def _text(answer: Any) -> str:
    """The answer as text; values other than text as JSON."""
    if answer is None:
        return ""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=repr)


def _kind(value: object) -> str:
    match value:
        case None:
            return "nothing (null)"
        case dict():
            return f"an object with {listed([str(key) for key in value])}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
