"""Names of fields in a data set for the names of tasks: `[data.fields]`."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from relax_actors.errors import ConfigError

READ = (
    "prompt",
    "messages",
    "answer",
    "images",
    "image",
    "videos",
    "video",
    "audios",
    "audio",
    "category",
    "chosen",
    "rejected",
    "label",
    "tools",
)
"""Names that relax-actors itself reads."""
CONVERSATIONS = ("messages", "conversations")
"""Fields of whole conversations; the first that a row without a prompt has is its prompt."""
ABSENT = object()
"""Stands for the value of a field that a row lacks."""
_SHOWN, _DEPTH = 20, 3


def listed(names: Iterable[str]) -> str:
    """Join names with commas; at most twenty."""
    shown = list(names)
    return ", ".join(shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "") if shown else "none"


def value_at(row: Any, name: str) -> Any:
    """Return a field's value; dots lead into objects and lists. `ABSENT` if missing."""
    if isinstance(row, Mapping) and name in row:
        return row[name]
    first, dot, rest = name.partition(".")
    if isinstance(row, Mapping):
        return value_at(row[first], rest) if dot and first in row else ABSENT
    if isinstance(row, list) and first.isdecimal() and int(first) < len(row):
        return value_at(row[int(first)], rest) if dot else row[int(first)]
    return ABSENT


def names_in(row: Any, depth: int = _DEPTH) -> Iterator[str]:
    """Return the dotted names of the fields of a row."""
    for name, value in row.items() if isinstance(row, Mapping) else ():
        yield str(name)
        if depth > 1:
            yield from (f"{name}.{inner}" for inner in names_in(value, depth - 1))


class FieldNames:
    """Gives a row's fields the names of tasks; raises ConfigError for bad `data.fields`."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)
        if empty := [ours for ours, theirs in self.names.items() if not (ours and theirs)]:
            msg = f"data.fields.{empty[0]} is empty; give the name of a field of the data, or leave it out"
            raise ConfigError(msg)
        if {"prompt", "messages"} <= self.names.keys():
            msg = "data.fields names both a prompt and messages; the prompt of a row is one of them: leave one out"
            raise ConfigError(msg)
        if "messages" in self.names:
            self.names["prompt"] = self.names.pop("messages")
        self.prompt = self.names.get("prompt", "prompt")

    def renamed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row under our names; a conversation is the prompt of a row without a prompt."""
        given = {ours: value_at(row, theirs) for ours, theirs in self.names.items()}
        taken = {*self.names, *self.names.values()}
        fields = {name: value for name, value in row.items() if name not in taken}
        fields |= {name: value for name, value in given.items() if value is not ABSENT}
        if "prompt" not in fields and "prompt" not in self.names:
            conversation = next((name for name in CONVERSATIONS if name in fields), "prompt")
            fields = {"prompt" if name == conversation else name: value for name, value in fields.items()}
        return fields

    def has_prompt(self, columns: Collection[str]) -> bool:
        """Whether rows with these fields may have a prompt."""
        wanted = {self.prompt, self.prompt.partition(".")[0]}
        known = wanted if "prompt" in self.names else wanted | {*CONVERSATIONS}
        return bool(known & {*columns})

    def without_prompt(self, fields: Iterable[str], what: str = "field") -> str:
        """Describe rows with these fields, which have no prompt, with the remedy."""
        names = list(fields)
        remedy = self._remedy("prompt", self.prompt, names)
        return f"no {what} {self.prompt!r}; {what}s found: {listed(names)}; {remedy}"

    def check(self, rows: list[Any], where: str) -> None:
        """Check that each name is a field of one of the first rows; raises ConfigError.
        them.
        """
        rows = [row for row in rows if isinstance(row, Mapping)]
        for ours, theirs in self.names.items():
            if rows and all(value_at(row, theirs) is ABSENT for row in rows):
                first = "row has" if len(rows) == 1 else f"{len(rows)} rows have"
                names = list(names_in(rows[0]))
                msg = (
                    f"{where}: data.fields.{ours} = {theirs!r}, but the first {first} no such field; fields found: "
                    f"{listed(names)}; {self._remedy(ours, theirs, names)}"
                )
                raise ConfigError(msg)

    @staticmethod
    def _remedy(ours: str, theirs: str, names: list[str]) -> str:
        close = difflib.get_close_matches(theirs, names, 1)
        return f"set data.fields.{ours}" + (f' = "{close[0]}"' if close else " to one of them")

    def misspelled(self) -> Iterator[str]:
        """Note names that look like misspelled ones of `READ`."""
        for name in self.names:
            if name not in READ and (close := difflib.get_close_matches(name, READ, 1, 0.8)):
                yield (
                    f"data.fields.{name} becomes {name!r} of a row's metadata, which only your own code reads; did you "
                    f"mean {close[0]!r}?"
                )
