"""Runs whose prompts leave less room than `rollout.max_tokens`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.running import TINY, Run

TASKS = '''
def make(*, size, seed):
    """Every other prompt has 60 of the model's 64 tokens."""
    return [("7" * 59 + ">" if i % 2 else f"{i % 10}>", "1") for i in range(size or 20)]


def fits(completion, prompt):
    """Reward that fails unless prompts and completions are as long as they may be."""
    length = len(prompt.tokens)
    assert length in (2, PROMPT), length
    assert len(completion) <= (COMPLETION if length > 2 else 8), completion
    return completion.count("7") / 8
'''


@pytest.mark.slow
@pytest.mark.parametrize(("oversize", "prompt", "completion"), [("keep", 60, 4), ("truncate_left", 56, 8)])
def test_long_prompts_are_kept_or_cut_off_and_trained(
    make_run: Callable[..., Run], tmp_path: Path, oversize: str, prompt: int, completion: int
) -> None:
    numbers = f"PROMPT, COMPLETION = {prompt}, {completion}\n"
    (tmp_path / "long_prompts.py").write_text(numbers + TASKS)
    config = tmp_path / "long.toml"
    config.write_text(TINY.read_text())
    data = ("data.function=long_prompts.make", "data.size=20", f"data.oversize={oversize}")
    more = ("reward.function=long_prompts.fits", "rollout.max_tokens=8", "run.steps=4", "staleness.max=0")
    result = make_run("long", *data, *more, config=config).complete()
    assert (result["trained"], result["quarantined"]) == (16, 0)
