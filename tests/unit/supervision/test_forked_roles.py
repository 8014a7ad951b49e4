"""Roles whose actors the zygote forks: all that share its secrets and have no limit of memory of their own."""

from __future__ import annotations

import pytest

from relax_actors.config import load_config
from relax_actors.roles import role_names
from relax_actors.supervision.node import forked_roles
from tests.support.running import TINY

LIGHT = {"prompts", "reward", "advantages"}


@pytest.mark.parametrize(
    ("settings", "forked"),
    [
        ([], LIGHT),
        (["reward.secrets=['JUDGE_API_KEY']"], LIGHT - {"reward"}),
        (["reward.memory_limit_mib=512"], LIGHT - {"reward"}),
        (["rollout.secrets=['MODEL_TOKEN']"], set()),
    ],
)
def test_light_roles_with_other_secrets_or_a_limit_of_memory_are_not_forked(
    settings: list[str], forked: set[str]
) -> None:
    config = load_config(TINY, settings)
    assert set(forked_roles(config, role_names(config))) & (LIGHT | {"trainer", "rollout"}) == {
        "trainer",
        "rollout",
        *forked,
    }


def test_a_node_without_a_role_that_imports_torch_has_no_zygote() -> None:
    assert forked_roles(load_config(TINY), sorted(LIGHT)) == []
