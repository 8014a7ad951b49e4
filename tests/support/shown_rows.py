"""Rows with everything that the console shows of them, written to the table of a run without processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from broker.subjects import RowId
from relax_actors.messages import (
    Advantage,
    Batch,
    MediaSource,
    Prompt,
    Quarantined,
    Reward,
    Sample,
    SessionLog,
    SessionTurn,
    TokenSequence,
    Trajectory,
    Turn,
)
from tests.support.consoles import WrittenRun

PROMPT = np.array([1, 2, 3, 4], np.int32)


def stored_medium(run: WrittenRun, kind: str, data: bytes, name: str) -> MediaSource:
    """Write a file to the store of a run; return the reference to it."""
    path = run.folder.root / "store" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return MediaSource(kind, name, xxh3_128=xxhash.xxh3_128_hexdigest(data), size=len(data), stored=True)


def sequence_of(own: int, version: int) -> TokenSequence:
    """Return a sequence of the prompt and `own` tokens, the first of which is an observation."""
    tokens = np.concatenate([PROMPT, np.arange(own) % 9]).astype(np.int32)
    mask = np.arange(len(tokens)) > len(PROMPT)
    logprobs = np.where(mask, -np.linspace(0.1, 3, len(tokens)), 0).astype(np.float32)
    versions, entropies = np.where(mask, version, -1).astype(np.int32), np.where(mask, 0.75, 0).astype(np.float32)
    return TokenSequence(tokens, mask, logprobs, versions, entropies=entropies)


def call_of(name: str) -> dict[str, Any]:
    """Return a message that calls a tool."""
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": {"x": 1}}}]}


def write_row(
    run: WrittenRun,
    row: RowId,
    texts: Sequence[str],
    *,
    own: int = 6,
    media: Sequence[MediaSource] = (),
    tool: str = "",
) -> None:
    """Write all parts of a row whose samples have these texts; with `tool`, also the turns of the first sample."""
    said = [{"role": "user", "content": texts[0]}, call_of(tool), {"role": "tool", "content": texts[-1]}]
    samples = [Sample((sequence_of(own, row.step),), text, "stop", messages=said if tool else []) for text in texts]
    rewards = np.arange(len(texts), dtype=np.float32)
    trajectory = Trajectory.of(PROMPT, samples)
    values = np.repeat(rewards - rewards.mean(), trajectory.sample_lengths).astype(np.float32)
    prompt = Prompt(texts[0], PROMPT, texts[-1], {"level": texts[0]}, 1, row.step, media=list(media))
    cells = [
        (run.subjects.cell(row, "prompt"), prompt),
        (run.subjects.cell(row, "trajectory"), trajectory),
        (run.subjects.cell(row, "reward"), Reward(rewards, {"form": rewards / 2})),
        (run.subjects.cell(row, "advantage"), Advantage(values, float(rewards.mean()), per_token=True)),
    ]
    if tool:
        turns = [turn_of(0, -1, [said[0], call_of(tool)]), turn_of(1, 0, [said[2]]), turn_of(2, 0, [said[2]])]
        cells.insert(1, (run.subjects.turn(row, 0, 0), SessionLog(turns=turns)))
    for cell in cells:  # in this order
        run.table.put(*cell)


def turn_of(number: int, parent: int, messages: list[dict[str, Any]]) -> SessionTurn:
    """Return a turn of the first sample."""
    tokens = np.arange(3, dtype=np.int32)
    versions = np.ones(3, np.int32)
    turn = Turn(parent, PROMPT, tokens, np.full(3, -0.5, np.float32), versions, "stop", messages=messages)
    return SessionTurn(0, number, turn)


def write_batch(run: WrittenRun, step: int, rows: Sequence[int]) -> None:
    """Write the batch of a step."""
    run.table.put(run.subjects.numbered("batch", step), Batch(list(rows), 1, 1, 0.5, 1, 8, 1e9))


def quarantine(run: WrittenRun, row: RowId, error: str) -> None:
    """End a row by a failure."""
    run.table.put(run.subjects.cell(row, "quarantined"), Quarantined("reward", 3, error, f"Traceback: {error}"))
