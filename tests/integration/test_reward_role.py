"""The role reward: samples that failed have reward 0, whatever the reward functions make of their texts."""

from __future__ import annotations

import numpy as np
import pytest

from broker.codec import encode
from broker.subjects import RowId
from relax_actors.messages import FinishReason, Prompt, Trajectory
from relax_actors.roles.reward import RewardRole
from relax_actors.runtime import Row
from tests.support.contexts import MakeContext

TABLE = 'reward.function={"exact_match" = 1.0, "positional_match" = 2.0}'


@pytest.mark.parametrize("function", ["reward.function=exact_match", TABLE])
def test_a_sample_that_failed_has_reward_0(make_context: MakeContext, function: str) -> None:
    role = RewardRole()
    role.context = make_context("reward", function)
    role.setup()
    ids, two = np.arange(2, dtype=np.int32), np.full(2, 1, np.int32)
    reasons = [str(FinishReason.ERROR), str(FinishReason.STOP)]
    trajectory = Trajectory(ids, two, ids, np.zeros(2, np.float32), two, ["7", "7"], reasons)
    prompt = Prompt("say 7", ids, "7", {}, seed=0, min_version=0)
    cells = {"prompt": encode(prompt, "prompts.0#1"), "trajectory": encode(trajectory, "rollout.0#1")}
    found = role.handle(Row(RowId(0, 0), cells, role.context.table.store))
    if function == TABLE:
        assert found.values.tolist() == [0.0, 3.0]
        assert {name: part.tolist() for name, part in found.components.items()} == {
            "exact_match": [0.0, 1.0],
            "positional_match": [0.0, 1.0],
        }
    else:
        assert (found.values.tolist(), found.components) == ([0.0, 1.0], {})
