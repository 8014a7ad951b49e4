"""Silent failures in real runs: `relax doctor` names each within 10 steps."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.support.running import Run, relax

pytestmark = pytest.mark.slow
FAULTS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "reward_that_parses_nothing": (
        ("reward.function=tiny_tasks.never_parsed", "trainer.weight_decay=0"),
        {"flat_reward", "groups_without_signal"},
    ),
    "weights_that_never_arrive": (
        ("rollout.backend=wrong_engines.NeverUpdated", "trainer.learning_rate=2e-2"),
        {"weights_not_refreshed"},
    ),
    "log_probs_of_another_temperature": (
        ("rollout.backend=wrong_engines.OtherTemperature",),
        {"engines_disagree"},
    ),
    "stop_token_that_never_comes": (
        ("rollout.max_tokens=24", "rollout.min_tokens=24", "reward.function=tiny_tasks.never_parsed"),
        {"never_ends"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named_within_ten_steps(make_run: Callable[..., Run], fault: str) -> None:
    settings, rules = FAULTS[fault]
    run = make_run(fault, *settings, "run.steps=10", "staleness.max=0")
    run.complete()
    done = relax("doctor", str(run.folder.root), "--json", cwd=run.cwd)
    body = json.loads(done.stdout)
    assert done.returncode == 1
    found = {finding["rule"] for finding in body["findings"] if finding["severity"] == "problem"}
    assert rules <= found, body
    for finding in body["findings"]:
        assert finding["remedy"] or not finding["rule"]
        assert finding["evidence"] or not finding["rule"]
