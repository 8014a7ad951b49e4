"""Examples with scores that a judge should agree with."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relax_actors.errors import ConfigError
from relax_actors.messages import Prompt


@dataclass(frozen=True, slots=True)
class Example:
    """A completion with the score that it should get, in any unit."""

    prompt: Prompt
    completion: str
    score: float


def examples_of(file: Path, mode: str) -> list[Example]:
    """Read examples, one a line.

    Raises:
        ConfigError: the file cannot be read, a line is not a valid example, or no two of them can be compared.
    """
    where = f"reward.options.judge.calibration = {str(file)!r}"
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{where} cannot be read: {error}"
        raise ConfigError(msg) from error
    found = [_example(line, f"{where}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not any(ordered_pairs(found, same_prompt=mode == "pairwise")):
        of_one = " of one prompt" if mode == "pairwise" else ""
        msg = f"{where} has no two examples{of_one} with different scores; add some"
        raise ConfigError(msg)
    return found


def ordered_pairs(examples: Sequence[Example], *, same_prompt: bool) -> Iterator[tuple[Example, Example]]:
    """Yield pairs of examples with different scores, the better one first."""
    for one, other in itertools.combinations(examples, 2):
        if one.score != other.score and (not same_prompt or one.prompt.text == other.prompt.text):
            yield (one, other) if one.score > other.score else (other, one)


def _example(line: str, where: str) -> Example:
    try:
        body = json.loads(line)
        match body:
            case {"prompt": str(text), "completion": str(completion), "score": int() | float() as score}:
                answer = str(body.get("answer", ""))
                return Example(Prompt(text, np.zeros(1, np.int32), answer, {}, 0, 0), completion, float(score))
    except ValueError:
        pass
    msg = f'{where} is not a valid example; write {{"prompt": ..., "completion": ..., "score": ...}}'
    raise ConfigError(msg)
