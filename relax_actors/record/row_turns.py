"""Turns of a row's samples, from its turn cells: texts, tokens and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from relax_actors.errors import CodecError, StoreError
from relax_actors.messages import SessionLog, SessionTurn
from relax_actors.messages.said import said
from relax_actors.record.row_cells import RowCells


@dataclass(frozen=True, slots=True)
class RowTurn:
    """A turn of a sample.

    Attributes:
        sample: index of the sample.
        number: number of the turn in its attempt; with agents, in the sample.
        attempt: attempt of the episode.
        parent: number of the turn that it continues; -1 if it continues none.
        player: whose turn it is; empty without players.
        tokens: tokens that the model wrote.
        versions: versions that sampled them.
        finish_reason: why the answer ended.
        calls: tools that it called, as `{"name", "arguments"}`.
        messages: what the model read and wrote, as (role, text).
        author: actor that wrote the cell of the turn.
        time: Unix time in seconds at which the cell was stored; turns of one cell share it.
        reward: reward of the answer before it; None if there was none.
    """

    sample: int
    number: int
    attempt: int
    parent: int
    player: str
    tokens: int
    versions: list[int]
    finish_reason: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    messages: list[tuple[str, str]] = field(default_factory=list)
    author: str = ""
    time: float = 0.0
    reward: float | None = None


def turns_of(cells: RowCells) -> list[RowTurn]:
    """Return a row's turns in the order of writing, without unreadable cells."""
    turns: list[RowTurn] = []
    for name, cell in cells.cells.items():
        if name.startswith("turns."):
            with suppress(CodecError, StoreError, ValueError):
                log = cells.read(name, SessionLog)
                author = cells.author(name)
                turns += [_turn(each, author, cell.stored) for each in (log.turns if log is not None else ())]
    return turns


def _turn(each: SessionTurn, author: str, time: float) -> RowTurn:
    turn, seen = each.turn, each.seen
    return RowTurn(
        sample=each.sample,
        number=each.number,
        attempt=each.attempt,
        parent=turn.parent,
        player=turn.player,
        tokens=len(turn.tokens),
        versions=sorted(set(turn.versions.tolist())),
        finish_reason=turn.finish_reason,
        calls=list(_calls(turn.messages)),
        messages=said(turn.messages),
        author=author,
        time=time,
        reward=None if seen is None else seen.reward,
    )


def _calls(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                yield {"name": str(function.get("name", "")), "arguments": function.get("arguments")}
