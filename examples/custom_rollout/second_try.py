"""A custom rollout: the model answers, reads a question mark, and answers again."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from relax_actors import NOT_SAMPLED, EpisodeRollout, Generate, Generation, Row, Sample, Task, TokenSequence

Tokens = NDArray[np.int32]
PARTS = 8
"""Parts of all numbers, of which one is held out: training never sees it."""


def make(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return `size` numbers (by default 1,000), whose first digit is the answer; `held_out` ones are never trained."""
    numbers = [f"{number:02}" for number in range(100)]
    own = [number for number in numbers if (zlib.crc32(number.encode()) % PARTS == 0) == held_out]
    drawn = own if held_out else np.random.default_rng(seed).choice(own, size or 1000).tolist()
    return [Task(f"{number}>", number[0]) for number in drawn[:size]]


class SecondTry(EpisodeRollout):
    """Let the model answer twice; the reward sees the second answer, and both are trained."""

    def samples(self, row: Row, generate: Generate) -> list[Sample]:
        """Return samples of two turns; the question mark between them is not trained."""
        prompt, question = self.prompt_tokens(row), self.tokens("?")
        first = generate([prompt] * self.group_size(row))
        asked = [np.concatenate([prompt, answer.tokens, question]) for answer in first]
        second = generate(asked)
        return [
            Sample(
                (two_turns(prompt, one, question, two),),
                self.text(two.tokens),
                two.finish_reason,
                {"turns": 2.0, "changed": float(not np.array_equal(one.tokens, two.tokens))},
            )
            for one, two in zip(first, second, strict=True)
        ]


def two_turns(prompt: Tokens, one: Generation, question: Tokens, two: Generation) -> TokenSequence:
    """Lay prompt, first answer, question and second answer end to end; only the answers are trained."""
    parts = [prompt, one.tokens, question, two.tokens]
    sampled = np.repeat([False, True, False, True], [len(part) for part in parts])
    logprobs, versions = np.zeros(len(sampled), np.float32), np.full(len(sampled), NOT_SAMPLED, np.int32)
    logprobs[sampled] = np.concatenate([one.logprobs, two.logprobs])
    versions[sampled] = np.concatenate([one.versions, two.versions])
    return TokenSequence(np.concatenate(parts).astype(np.int32), sampled, logprobs, versions)
