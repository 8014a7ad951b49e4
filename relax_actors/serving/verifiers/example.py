"""Examples of an environment, and the rows that a run makes its samples from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from relax_actors.serving.session_client import AgentResult, AgentTask


class VerifiersError(Exception):
    """An environment that cannot be trained, or a row that is not of it."""


@dataclass(frozen=True, slots=True)
class Example:
    """One example of an environment.

    Attributes:
        value: what the environment takes.
        prompt: a text or messages; None if the environment opens the conversation.
        answer: reference answer; empty if there is none.
    """

    value: Any
    prompt: Any
    answer: str = ""

    @property
    def digest(self) -> str:
        """Digest of prompt and answer."""
        known = json.dumps([self.prompt, self.answer], sort_keys=True, default=str)
        return hashlib.sha256(known.encode()).hexdigest()[:16]

    def row(self, index: int, split: str) -> dict[str, Any]:
        """Row of a JSON Lines file that names this example."""
        prompt = self.prompt or f"example {index}"
        return {"prompt": prompt, "answer": self.answer, "index": index, "split": split, "digest": self.digest}


class VerifiersEnvironment(Protocol):
    """An environment of verifiers, of whichever API."""

    def examples(self, split: str) -> Iterator[Example]:
        """Yield the examples of a split, always in the same order."""

    def example(self, split: str, index: int) -> Example | None:
        """Return an example, None if there are fewer."""

    async def run(self, example: Example, task: AgentTask) -> AgentResult:
        """Run an episode against the session of a sample, and score it."""

    async def close(self) -> None:
        """Free what the environment holds."""


def example_of(environment: VerifiersEnvironment, task: AgentTask) -> Example:
    """Return the example of a sample's row; raises VerifiersError if it is missing or differs."""
    metadata = task.task["metadata"]
    index, split = metadata.get("index"), metadata.get("split", "train")
    if not isinstance(index, int) or index < 0:
        msg = f"the row names no example: index = {index!r}; write the rows with --rows"
        raise VerifiersError(msg)
    example = environment.example(split, index)
    if example is None:
        msg = f"the environment has no example {index} of split {split!r}; write the rows with --rows again"
        raise VerifiersError(msg)
    if metadata.get("digest", example.digest) != example.digest:
        msg = (
            f"example {index} of split {split!r} differs from the row; give the arguments that the rows were written "
            "with, or write them again with --rows"
        )
        raise VerifiersError(msg)
    return example
