"""The file of an evaluation: a line of JSON for each held-out prompt.

The first line names the run, the version and the settings of the sets. The file appears as a whole, before the result
of the version is published, and an evaluation that is repeated after a kill writes the same file again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from broker.files import make_private_folder
from relax_actors.errors import ConfigError

FORMAT = 1
"""Format of the file; its first line has it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a held-out prompt.

    Attributes:
        text: what the model wrote.
        reward: its reward.
        tokens: number of its tokens; None if they are lost.
        finish_reason: why it ended.
        vote: what majority@k counts as its answer.
        messages: the conversation of an episode as (role, text); empty for a completion.
    """

    text: str
    reward: float
    tokens: int | None = None
    finish_reason: str = ""
    vote: str = ""
    messages: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Record:
    """A held-out row.

    Attributes:
        row: id of the row, `eval.<version>.<index>`.
        set: name of its set.
        category: value of the set's category field; empty without one.
        prompt: the prompt as the model reads it.
        messages: the prompt as chat messages, as (role, text); empty for a text.
        answer: expected answer.
        answers: the answers; empty if the row was quarantined or dropped.
        problem: why the row has no answers; empty if it has.
    """

    row: str
    set: str
    category: str
    prompt: str
    answer: str
    answers: list[Answer]
    messages: list[tuple[str, str]] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SetFacts:
    """What the figures of a set depend on; see `relax_actors.config.evaluation.EvalSet`.

    Attributes:
        samples: answers to each prompt.
        ks: the k of pass@k and majority@k.
        passes: least reward of an answer that passes; None if rewards are log-probs, which pass nothing.
        category: field of the categories; None without them.
        reward: reward of the answers, as `eval.reward`; where rows come from data, what is scored in its place.
    """

    samples: int = 1
    ks: tuple[int, ...] = (1,)
    passes: float | None = 1.0
    category: str | None = None
    reward: str | dict[str, float] = "exact_match"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation: run, version, fingerprint, facts of its sets, and rows."""

    run: str
    version: int
    fingerprint: str
    sets: dict[str, SetFacts]
    records: list[Record] = field(default_factory=list)


def write_evaluation(path: Path, head: Evaluated, records: Iterable[Record]) -> None:
    """Write the file of an evaluation atomically; only its user may read it.

    The records of `head` are not used: `records` are written one by one. Raises OSError if they cannot be written.
    """
    make_private_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    first = {"format": FORMAT, **{key: value for key, value in asdict(head).items() if key != "records"}}
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(json.dumps(first) + "\n")
            for record in records:
                file.write(json.dumps(asdict(record)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_evaluation(path: Path) -> Evaluated:
    """Read the file of an evaluation; raises ConfigError."""
    try:
        with path.open() as file:
            return _read(iter(file))
    except FileNotFoundError as error:
        msg = f"there is no evaluation {path}"
        raise ConfigError(msg) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StopIteration) as error:
        msg = f"{path} cannot be read as an evaluation ({type(error).__name__}: {error}); evaluate the version again"
        raise ConfigError(msg) from error


def _read(lines: Iterator[str]) -> Evaluated:
    head = json.loads(next(lines))
    if (version := head.pop("format")) != FORMAT:
        msg = f"it has format {version}, and this version reads format {FORMAT}"
        raise ValueError(msg)
    sets = {name: SetFacts(**{**facts, "ks": tuple(facts["ks"])}) for name, facts in head.pop("sets").items()}
    return Evaluated(**head, sets=sets, records=[_record(json.loads(line)) for line in lines])


def _record(body: dict[str, Any]) -> Record:
    answers = [Answer(**{**one, "messages": _messages(one["messages"])}) for one in body.pop("answers")]
    return Record(**{**body, "messages": _messages(body["messages"])}, answers=answers)


def _messages(pairs: list[list[str]]) -> list[tuple[str, str]]:
    return [(str(role), str(text)) for role, text in pairs]


def versions_in(folder: Path) -> list[int]:
    """Return the versions that have a file in a folder of evaluations, ascending."""
    names = [path.name.removesuffix(".jsonl") for path in folder.glob("*.jsonl")] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())
