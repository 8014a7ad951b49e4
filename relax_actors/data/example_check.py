"""Checks of examples before the first step: what of the first rows would be trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from relax_actors.config.data import DataSection
from relax_actors.data.check import note_source
from relax_actors.data.checked_run import CheckedRun
from relax_actors.data.example import Example
from relax_actors.data.examples import ExampleMaker, row_of
from relax_actors.data.mixture import first_items
from relax_actors.data.prompt_maker import PromptMaker, admission_of
from relax_actors.data.source import DataSource
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import ConfigError, RowError, SlowRowError
from relax_actors.messages import Trajectory

SAMPLED_ROWS = 200
"""Rows of a data source that are made into examples."""
MAX_SLOW_ROWS = 2
"""Rows that may take too long before the check gives up."""
SHOWN = 600
"""Characters of the first row that are shown."""
OPEN, CLOSE = "⟦", "⟧"
"""Around trained text."""


@dataclass(slots=True)
class _Seen:
    """What the first rows of the data were made into."""

    examples: list[Example] = field(default_factory=list)
    rows: list[Trajectory] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def check_examples(run: CheckedRun, data: DataSection, where: str) -> Iterator[str]:
    """Make the first rows of a data source into examples, and note what of them is trained.

    Raises:
        ConfigError: the source does not open, none of the rows can be trained, or a text begins twice.
    """
    source, model = run.source(data), run.model
    if model is None:
        return
    context, admission = model.facts.context_length, admission_of(run.config, folder=model.folder)
    family = None if admission is None else admission.family
    maker = ExampleMaker(run.config, data, model.tokenizer, context, family)
    prompts = PromptMaker(data, model.tokenizer, context, 0, admission)
    count = min(SAMPLED_ROWS, len(source))
    seen = _sample(source, prompts, maker, count, where)
    if len(seen.bad) == count:
        msg = f"{where}: none of the first {count} rows can be trained; the first: {seen.bad[0]}"
        raise ConfigError(msg)
    if seen.bad:
        yield f"{where}: {len(seen.bad)} of the first {count} rows will be quarantined; the first: {seen.bad[0]}"
    _check_beginnings(seen.examples, model.tokenizer, where)
    yield from note_source(run.config, data, source, where)
    scores = run.config.algorithm.trains_scores
    yield _shares(seen, len(source), where, scores=scores)
    if not scores:
        yield from _stops(seen.examples, model.tokenizer, where)
    shown = "; ".join(marked(example, model.tokenizer) for example in seen.examples[: len(seen.rows[0].texts)])
    what = "text" if not scores else "text, at whose end a score is read"
    yield f"{where}: the first row, with {OPEN}{'scored' if scores else 'trained'}{CLOSE} {what}: {shown}"


def _sample(source: DataSource, prompts: PromptMaker, maker: ExampleMaker, count: int, where: str) -> _Seen:
    seen, slow = _Seen(), 0
    for i, item in enumerate(first_items(source, count)):
        try:
            task = source[item]
            row = row_of(task, seed=0, min_version=0, media=prompts.media_of(task))
            seen.rows.append(maker.make(row))
            seen.examples += maker.examples(row)
        except RowError as error:
            seen.bad.append(f"row {i + 1}: {error}")
            slow += isinstance(error, SlowRowError)
            if slow == MAX_SLOW_ROWS:
                msg = f"{where}: {slow} of the first {i + 1} rows take too long; the last: {error}"
                raise ConfigError(msg) from error
    return seen


def _check_beginnings(examples: Sequence[Example], tokenizer: Tokenizer, where: str) -> None:
    """Refuse texts with two equal special tokens at the start, of template and tokenizer."""
    special = {int(i) for i, token in tokenizer.inner.get_added_tokens_decoder().items() if token.special}
    for example in examples:
        first, second = (*example.ids[:2].tolist(), -1, -2)[:2]
        if first == second and first in special:
            text = tokenizer.inner.id_to_token(first)
            msg = f"{where}: a row begins with {text!r} twice, as the tokenizer adds one; remove it from the data"
            raise ConfigError(msg)


def _shares(seen: _Seen, rows: int, where: str, *, scores: bool) -> str:
    tokens = sum(len(example.ids) for example in seen.examples)
    trained = sum(int(row.trained.sum()) for row in seen.rows)
    longest = max(len(example.ids) for example in seen.examples)
    cut = sum("length" in row.finish_reasons for row in seen.rows)
    share = f"{trained} scores are trained" if scores else f"{trained / tokens:.0%} of their tokens are trained"
    seen_rows = f"{rows} rows of up to {longest} tokens among the first {len(seen.rows)}"
    return f"{where}: {seen_rows}; {share}, {cut} rows are cut off"


def _stops(examples: Sequence[Example], tokenizer: Tokenizer, where: str) -> Iterator[str]:
    """Note examples without a trained stop token, which would not teach to end."""
    stops = list(tokenizer.stop_ids)
    endless = sum(not np.isin(example.ids[example.trained], stops).any() for example in examples)
    if endless:
        named = ", ".join(repr(tokenizer.inner.id_to_token(stop)) for stop in sorted(stops)) or "none is known"
        yield (
            f"{where}: {endless} of {len(examples)} answers train no stop token ({named}), so that the model does not "
            "learn to end them; correct eos_token_id in generation_config.json, or the chat template"
        )


def marked(example: Example, tokenizer: Tokenizer) -> str:
    """Return an example's text, its trained parts in brackets; at most `SHOWN` characters."""
    parts, at = [], 0
    for is_trained, run in groupby(example.mask.tolist()):
        end = at + len(list(run))
        text = str(tokenizer.inner.decode(example.ids[at:end].tolist(), skip_special_tokens=False))
        parts.append(f"{OPEN}{text}{CLOSE}" if is_trained else text)
        at = end
    text = "".join(parts)
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."
