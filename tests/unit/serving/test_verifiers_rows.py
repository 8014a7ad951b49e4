"""Rows name the examples of an environment of verifiers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from relax_actors.serving.session_client import AgentResult, AgentTask
from relax_actors.serving.verifiers.example import Example, VerifiersError, example_of

EXAMPLES = [Example(number, [{"role": "user", "content": f"say {number}"}], str(number)) for number in range(3)]


class Three:
    """Has three examples for training."""

    def examples(self, split: str) -> Iterator[Example]:  # noqa: ARG002
        return iter(EXAMPLES)

    def example(self, split: str, index: int) -> Example | None:
        return EXAMPLES[index] if split == "train" and index < len(EXAMPLES) else None

    async def run(self, example: Example, task: AgentTask) -> AgentResult:  # noqa: ARG002
        return AgentResult()

    async def close(self) -> None: ...


def named(**metadata: Any) -> Example:
    return example_of(Three(), AgentTask("s", "", "", "", {"metadata": metadata}, 1.0))


def test_the_row_of_an_example_names_it() -> None:
    for index, example in enumerate(EXAMPLES):
        row = example.row(index, "train")
        assert (row.pop("prompt"), row.pop("answer")) == (example.prompt, example.answer)
        assert named(**row) is example
    assert named(index=2) is EXAMPLES[2]
    assert Example(0, None).row(4, "train")["prompt"] == "example 4"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "the row names no example: index = None; write the rows with --rows"),
        ({"index": -1}, "the row names no example: index = -1; write the rows with --rows"),
        ({"index": 3}, "the environment has no example 3 of split 'train'; write the rows with --rows again"),
        (
            {"index": 1, "digest": EXAMPLES[0].digest},
            (
                "example 1 of split 'train' differs from the row; give the arguments that the rows were written "
                "with, or write them again with --rows"
            ),
        ),
    ],
)
def test_a_row_that_names_no_example_says_how_to_write_it(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(VerifiersError) as raised:
        named(**metadata)
    assert str(raised.value) == message


def test_the_worker_imports_no_dependency_of_a_run() -> None:
    heavy = "torch nats numpy transformers starlette msgpack pydantic"
    program = f"import sys, relax_actors.serving.verifiers.__main__; print(set('{heavy}'.split()) & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
