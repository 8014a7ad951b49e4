"""Rows of held-out data that are nearly equal to rows of the training data."""

from __future__ import annotations

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from relax_actors.config.data import DataSection
from relax_actors.data.checked_run import CheckedRun
from relax_actors.data.mixture import first_items
from relax_actors.data.source import DataSource, blocks_of
from relax_actors.data.task import Medium, Task
from relax_actors.errors import RowError

MAX_HELD_OUT, MAX_TRAINED = 500, 20_000
"""Rows that are compared at most."""
MAX_SECONDS = 1.0
"""Time for a comparison; with less than all rows the note gives their number."""
NEAR = 0.8
"""Jaccard index of the word n-grams of two prompts from which on they are nearly equal."""
WORDS = 5
"""Words of an n-gram; a shorter prompt is one n-gram."""
FIRST_BYTES = 1 << 16
"""Bytes of a medium that are compared, with its size."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Pair:
    """A held-out row and the training row that is nearest to it, with their Jaccard index."""

    held_out: str
    trained: str
    index: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Number of compared rows, and pairs of nearly equal held-out and training rows."""

    held_out: int
    trained: int
    pairs: list[Pair]


def note_duplicates(run: CheckedRun, held_out: DataSection, where: str) -> Iterator[str]:
    """Note the rows of a held-out source that are nearly equal to rows of the training data.

    Args:
        run: the run.
        held_out: section of the held-out source.
        where: its name, for the note.
    """
    has_environment = run.config.environment is not None
    duplicates = compare(run.source(run.config.data), run.source(held_out))
    of = f"{duplicates.trained} compared rows of the training data"
    if not duplicates.pairs:
        yield f"{where}: none of {duplicates.held_out} rows is nearly equal to one of {of}"
        return
    first = max(duplicates.pairs, key=lambda pair: pair.index)
    yield (
        f"{where}: {len(duplicates.pairs)} of {duplicates.held_out} rows are nearly equal to one of {of}, so that "
        f"held-out scores are too good; the nearest: {first.held_out} and {first.trained}, which share "
        f"{first.index:.0%} of their sequences of {WORDS} words"
        + ("; metadata, which the environment reads, too, was not compared" if has_environment else "")
    )


def compare(trained: DataSource, held_out: DataSource, seconds: float = MAX_SECONDS) -> Comparison:
    """Compare the prompts of held-out rows with those of training rows, within a time.

    Training rows are drawn evenly from the whole source; where they are cheap to read in blocks only, they are read in
    order. Prompts with other media are different.
    """
    end = time.monotonic() + seconds
    texts = [(origin, grams) for origin, grams in _texts(held_out, first_items(held_out, MAX_HELD_OUT), end)]
    holders: dict[str, list[int]] = defaultdict(list)
    for number, (_, grams) in enumerate(texts):
        for gram in grams:
            holders[gram].append(number)
    items = np.unique(np.linspace(0, len(trained) - 1, min(MAX_TRAINED, len(trained))).astype(np.int64))
    if blocks_of(trained) is None:
        items = np.random.default_rng(0).permutation(items)
    best: dict[int, Pair] = {}
    count = 0
    for origin, grams in _texts(trained, items.tolist(), end):
        count += 1
        if holders.keys().isdisjoint(grams):
            continue
        shared = Counter(number for gram in grams for number in holders.get(gram, ()))
        for number, common in shared.items():
            other, own = texts[number]
            index = common / (len(own) + len(grams) - common)
            if index >= NEAR and (number not in best or index > best[number].index):
                best[number] = Pair(other, origin, index)
    return Comparison(len(texts), count, [*best.values()])


def _texts(source: DataSource, items: list[int], end: float) -> Iterator[tuple[str, set[str]]]:
    """Yield origin and word n-grams of the prompts of items, within a time."""
    for item in items:
        try:
            task = source[item]
        except RowError:
            continue
        if grams := _grams(task):
            if task.media:
                media = xxhash.xxh3_64_hexdigest(repr([*map(_identity, task.media)]).encode())
                grams = {f"{media} {gram}" for gram in grams}
            yield task.origin or f"row {item + 1}", grams
        if time.monotonic() > end:
            return


def _identity(medium: Medium) -> tuple[object, ...]:
    """Return the identity of a medium: size and first bytes, or its name if it is away."""
    data, size = medium.data[:FIRST_BYTES], len(medium.data)
    if medium.path:
        with suppress(OSError):
            path = (medium.folder or Path()) / medium.path
            with path.open("rb") as file:
                data, size = file.read(FIRST_BYTES), os.fstat(file.fileno()).st_size
    content = xxhash.xxh3_128_hexdigest(data) if data else medium.path or medium.digest or medium.url
    return medium.kind, size, content, medium.start, medium.end


def _grams(task: Task) -> set[str]:
    text = task.prompt if isinstance(task.prompt, str) else " ".join(_said(task.prompt))
    words = _WORD.findall(text.casefold())
    if len(words) <= WORDS:
        return {" ".join(words)} if words else set()
    return {" ".join(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}


def _said(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts of messages."""
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content if "text" in part)
