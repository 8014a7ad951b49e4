"""Make tasks from the fields of a row, with the checks that all data sources share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from broker.codec import MAX_CELL_BYTES
from relax_actors.data.plain import plain
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError

MAX_ROW_BYTES = MAX_CELL_BYTES
"""Size of a row in a file. Larger ones fit into no cell, and decoding some kilobytes of a file can take gigabytes."""
_SHOWN = 20


def check_index(i: int, size: int) -> None:
    """Raise IndexError unless `0 <= i < size`."""
    if not 0 <= i < size:
        msg = f"item {i} of a source of {size}"
        raise IndexError(msg)


def check_file(path: Path) -> None:
    """Raise ConfigError unless `path` is a file that is not empty."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
        msg = f"data.path = {str(path)!r} {what}; give the path of a file, absolute or from the working directory"
        raise ConfigError(msg)
    if path.stat().st_size == 0:
        msg = f"data.path = {str(path)!r} is empty; give a file with at least one row"
        raise ConfigError(msg)


def listed(names: list[str]) -> str:
    """Join names with commas; at most twenty."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "") if names else "none"


def task_of(row: object, where: str, prompt_field: str, answer_field: str) -> Task:
    """Make the task of a row of a file; all fields but prompt and answer become metadata.

    Args:
        row: the decoded row.
        where: file and line, for errors.
        prompt_field: field with the prompt.
        answer_field: field with the answer.

    Raises:
        RowError: the row is not an object, or its prompt is missing, empty or of the wrong type.
    """
    if not isinstance(row, dict):
        msg = f"{where}: {_kind(row)}, not an object; write {{{json.dumps(prompt_field)}: ...}}"
        raise RowError(msg)
    if prompt_field not in row:
        msg = f"{where}: no field {prompt_field!r}; fields found: {listed(list(row))}; set data.prompt_field or add it"
        raise RowError(msg)
    rest = {name: value for name, value in row.items() if name not in (prompt_field, answer_field)}
    try:
        answer, metadata = plain(row.get(answer_field)), plain(rest)
    except RecursionError:
        msg = f"{where}: nested too deeply; flatten the row"
        raise RowError(msg) from None
    prompt = checked_prompt(row[prompt_field], f"{where}, field {prompt_field!r}")
    return Task(prompt, _text(answer), metadata, where)


def checked_prompt(prompt: object, where: str) -> str | list[dict[str, str]]:
    """Return a prompt that is a text or a chat, and not empty.

    Raises:
        RowError: it is neither, or empty.
    """
    if isinstance(prompt, str):
        contents = [prompt]
        chat: str | list[dict[str, str]] = prompt
    elif isinstance(prompt, list):
        chat = [_message(message, f"{where}, message {number}") for number, message in enumerate(prompt, 1)]
        contents = [message["content"] for message in chat]
    else:
        msg = f"{where}: {_kind(prompt)}, neither a text nor a list of messages; correct the row"
        raise RowError(msg)
    if not any(content.strip() for content in contents):
        msg = f"{where}: empty; write a prompt or remove the row"
        raise RowError(msg)
    if any(not content.isascii() and content != plain(content) for content in contents):
        msg = f"{where}: half a surrogate pair, which no tokenizer accepts; write the whole character"
        raise RowError(msg)
    return chat


def _message(message: object, where: str) -> dict[str, str]:
    if isinstance(message, dict):
        present = {key: value for key, value in message.items() if value is not None}
        if {"role", "content"} <= present.keys() and all(isinstance(value, str) for value in present.values()):
            return present
    msg = f"{where}: {_kind(message)} that is not {{'role': text, 'content': text}}; correct the message"
    raise RowError(msg)


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
