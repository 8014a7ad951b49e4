"""Everything about a row: samples, tokens, turns, rewards, authors and times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.errors import CodecError, StoreError
from relax_actors.messages import Advantage, Prompt, Reward, Trajectory
from relax_actors.messages.media import MediaSource
from relax_actors.messages.samples import Sample
from relax_actors.record.row_cells import RowCells
from relax_actors.record.row_turns import RowTurn, turns_of

Array = NDArray[Any]
Spell = Callable[[int], str]
"""Text that a token adds."""
_OTHER = frozenset({"prompt", "media", "trajectory", "reward", "advantage", "dropped", "quarantined"})
"""Columns that are not numbers by token."""


@dataclass(frozen=True, slots=True)
class Part:
    """A cell of the row: column, author, time in the broker, and sequence."""

    column: str
    author: str
    time: float
    sequence: int
    size: int


@dataclass(frozen=True, slots=True)
class TokenStrip:
    """A token sequence of a sample, from the first token of the prompt to the last token.

    Attributes:
        player: player whose conversation it is; empty without players.
        prompt: number of leading tokens that are those of the row's prompt.
        ids: token ids.
        texts: text that each token adds; empty without a tokenizer on this machine.
        mask: whether each token is trained.
        versions: version that sampled each token; -1 where no policy did.
        numbers: name -> a number for each token, None where there is none: `logprob`, `advantage`, `entropy` with
            record.entropy, and those that other roles wrote, such as `reference`.
    """

    player: str
    prompt: int
    ids: list[int]
    texts: list[str]
    mask: list[bool]
    versions: list[int]
    numbers: dict[str, list[float | None]]


@dataclass(frozen=True, slots=True)
class SampleDetail:
    """A sample of the row; the fields are those of `messages.Sample`, `Reward` and `Advantage`."""

    text: str
    finish_reason: str
    messages: list[dict[str, Any]]
    reward: float | None
    components: dict[str, float]
    advantage: float | None
    metrics: dict[str, float]
    tokens: int
    trained: int
    versions: dict[int, int]
    """Number of tokens that each version sampled."""
    strips: list[TokenStrip]
    turns: list[RowTurn]


@dataclass(frozen=True, slots=True)
class RowDetail:
    """A row with everything that is known of it.

    Attributes:
        row: its id.
        why: rules of [record] that keep it; empty if it was read from the table.
        prompt: text of the prompt.
        messages: the prompt as chat messages; empty for a text.
        answer: expected answer.
        metadata: further data of the task.
        media: media of the prompt and of observations, by reference.
        parts: its cells in the order in which they were stored.
        end: fields of the cell that ended it untrained; empty if none did.
        problem: why it has no samples; empty if it has.
        samples: its samples.
    """

    row: str
    why: tuple[str, ...]
    prompt: str
    messages: list[dict[str, Any]]
    answer: str
    metadata: dict[str, Any]
    media: list[dict[str, Any]]
    parts: list[Part]
    end: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    samples: list[SampleDetail] = field(default_factory=list)


def detail_of(cells: RowCells, spell: Spell | None = None, *, tokens_of: int | None = None) -> RowDetail:
    """Return everything about a row.

    Args:
        cells: its cells.
        spell: text of a token; None without a tokenizer on this machine.
        tokens_of: the sample whose tokens are returned; None for all.
    """
    prompt, problem = _read(cells, "prompt", Prompt)
    trajectory, lost = _read(cells, "trajectory", Trajectory)
    ends = {name: {"column": name, **cells.fields(name)} for name in ("quarantined", "dropped") if name in cells.cells}
    samples = [] if trajectory is None else list(_samples(cells, trajectory, spell, tokens_of))
    sources = [] if prompt is None else list(prompt.media)
    if trajectory is not None:
        sources += [source for each in trajectory.observed for seen in each for source in seen.sources]
    return RowDetail(
        row=str(cells.row),
        why=cells.why,
        prompt="" if prompt is None else prompt.text,
        messages=[] if prompt is None else prompt.messages,
        answer="" if prompt is None else prompt.answer,
        metadata={} if prompt is None else prompt.metadata,
        media=[medium_of(source) for source in {source.digest: source for source in sources}.values()],
        parts=[
            Part(cell.field, cells.author(cell.field), cell.stored, cell.sequence, len(cell.data))
            for cell in cells.cells.values()
        ],
        end=next(iter(ends.values()), {}),
        problem="" if samples else (lost or problem or "it has no samples"),
        samples=samples,
    )


def medium_of(source: MediaSource) -> dict[str, Any]:
    """Return a medium by reference, without the place of its file."""
    return {
        "kind": source.kind,
        "name": source.url or source.path.rpartition("/")[2],
        "digest": source.digest,
        "size": source.size,
        "start": source.start,
        "end": source.end,
    }


def _read(cells: RowCells, name: str, expected: type[Any]) -> tuple[Any, str]:
    """Return a cell, or why it cannot be read."""
    try:
        return cells.read(name, expected), ""
    except (CodecError, StoreError, ValueError) as error:
        return None, str(error)


def _samples(
    cells: RowCells, trajectory: Trajectory, spell: Spell | None, tokens_of: int | None
) -> Iterator[SampleDetail]:
    reward, advantage = _read(cells, "reward", Reward)[0], _read(cells, "advantage", Advantage)[0]
    columns = dict(_token_columns(cells, trajectory, advantage))
    turns = turns_of(cells)
    own = np.concatenate([[0], np.cumsum(trajectory.lengths, dtype=np.int64)]).tolist()
    shared, first = trajectory.shared.tolist(), 0
    for i, sample in enumerate(trajectory.samples):
        places = range(first, first + len(sample.sequences))
        first = places.stop
        strips = [
            _strip(sample, place - places.start, shared[place], _part(columns, own[place], own[place + 1]), spell)
            for place in (places if tokens_of in (None, i) else ())
        ]
        versions, counts = np.unique(sample.versions, return_counts=True)
        yield SampleDetail(
            text=sample.text,
            finish_reason=str(sample.finish_reason),
            messages=sample.messages,
            reward=None if reward is None or i >= len(reward) else float(reward.values[i]),
            components={} if reward is None else {name: float(values[i]) for name, values in reward.components.items()},
            advantage=_of_sample(advantage, trajectory, i),
            metrics=dict(sample.metrics),
            tokens=sum(own[place + 1] - own[place] for place in places),
            trained=sum(int(sequence.loss_mask.sum()) for sequence in sample.sequences),
            versions=dict(zip(versions.tolist(), counts.tolist(), strict=True)),
            strips=strips,
            turns=[turn for turn in turns if turn.sample == i],
        )


def _of_sample(advantage: Advantage | None, trajectory: Trajectory, i: int) -> float | None:
    """Return a sample's advantage, or the mean of its trained tokens' own."""
    if advantage is None:
        return None
    if not _is_by_token(advantage, trajectory):
        return float(advantage.values[i]) if i < len(advantage.values) else None
    ends = np.concatenate([[0], np.cumsum(trajectory.sample_lengths)])
    part = slice(ends[i], ends[i + 1])
    values = advantage.values[part][trajectory.trained[part]]
    return float(values.mean()) if len(values) else None


def _is_by_token(advantage: Advantage, trajectory: Trajectory) -> bool:
    by_sample = len(advantage.values) == len(trajectory.texts) and not advantage.per_token
    return not by_sample and len(advantage.values) == len(trajectory.token_ids)


def _token_columns(cells: RowCells, trajectory: Trajectory, advantage: Advantage | None) -> Iterator[tuple[str, Array]]:
    """Yield the numbers of all own tokens, `[total]`, by name."""
    total = len(trajectory.token_ids)
    yield "logprob", trajectory.logprobs
    if trajectory.entropies is not None:
        yield "entropy", trajectory.entropies
    if advantage is not None and _is_by_token(advantage, trajectory):
        yield "advantage", advantage.values
    elif advantage is not None and len(advantage.values) == len(trajectory.texts):
        yield "advantage", np.repeat(advantage.values, trajectory.sample_lengths)
    for name in (name for name in cells.cells if name not in _OTHER and "." not in name):
        for inner in ("value", "logprobs"):
            values = cells.array(name, inner, "f")
            if values is not None and len(values) == total:
                yield name, values


def _part(columns: Mapping[str, Array], begin: int, end: int) -> dict[str, Array]:
    return {name: values[begin:end] for name, values in columns.items()}


def _strip(sample: Sample, number: int, shared: int, columns: Mapping[str, Array], spell: Spell | None) -> TokenStrip:
    sequence = sample.sequences[number]
    ids, sampled = sequence.token_ids.tolist(), sequence.sampled[shared:].tolist()
    numbers: dict[str, list[float | None]] = {}
    for name, values in columns.items():
        none: list[float | None] = [None] * shared
        numbers[name] = none + [v if known else None for v, known in zip(values.tolist(), sampled, strict=True)]
    texts: list[str] = []
    if spell is not None:
        with suppress(OverflowError):
            texts = [spell(token) for token in ids]
    mask, versions = sequence.loss_mask.tolist(), sequence.versions.tolist()
    return TokenStrip(sequence.player, shared, ids, texts, mask, versions, numbers)
