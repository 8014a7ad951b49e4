"""Call a role on a row made by hand, without a run: `python examples/custom_role/try_role.py`."""

import numpy as np
from length_penalty import LengthPenalty

from relax_actors import Reward, Row, Sample, TokenSequence, Trajectory


def make_sample(prompt: list[int], completion: list[int], text: str) -> Sample:
    """Build a sample with one sequence, whose completion was sampled by version 3 of the weights."""
    n = len(completion)
    logprobs, versions = np.full(n, -0.5, np.float32), np.full(n, 3, np.int32)
    return Sample((TokenSequence.of_completion(np.array(prompt), np.array(completion), logprobs, versions),), text)


def main() -> None:
    """Handle a row of two samples, of which the second exceeds the budget by two tokens."""
    prompt = [7, 10]
    samples = [make_sample(prompt, [7, 11], "7#"), make_sample(prompt, [7, 7, 7, 11], "777#")]
    trajectory = Trajectory.of(np.array(prompt, np.int32), samples)
    role = LengthPenalty.build({"budget": 2}, "roles.length_penalty")
    row = Row.of(trajectory=trajectory, reward=Reward(np.array([1.0, 1.0], np.float32)))
    print([round(value, 3) for value in role.handle(row)])


if __name__ == "__main__":
    main()
