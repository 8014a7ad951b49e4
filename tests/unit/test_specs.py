"""Facts of algorithm functions: wrong ones are refused where the decorator is written."""

from __future__ import annotations

from typing import Any

import pytest

from relax_actors import AdvantageSpec, LossSpec


@pytest.mark.parametrize(
    ("spec", "facts", "said"),
    [
        (AdvantageSpec, {"needs": "tokens"}, 'write needs=\\("tokens",\\)'),
        (AdvantageSpec, {"needs": ("token",)}, "token cannot be needed"),
        (AdvantageSpec, {"equal_rewards": "none"}, "equal_rewards = 'none'.*'zero', 'signal'"),
        (LossSpec, {"ratio": "token"}, "ratio = 'token'.*'setting', 'rollout'"),
        (LossSpec, {"over_sample": "max"}, "over_sample = 'max'.*'sum', 'mean'"),
    ],
)
def test_unknown_facts_are_refused_with_what_to_write(spec: Any, facts: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        spec(**facts)


@pytest.mark.parametrize("spec", [AdvantageSpec, LossSpec])
def test_a_decorator_without_parentheses_says_how_to_write_it(spec: Any) -> None:
    with pytest.raises(TypeError, match=rf"write @{spec.__name__}\(\.\.\.\)"):

        @spec
        def own(inputs: Any) -> Any:
            return inputs
