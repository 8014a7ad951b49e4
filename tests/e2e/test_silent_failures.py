"""Silent failures in real runs: `relax doctor` names each within 10 steps. Some runs have several of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.adapters import base_folder
from tests.support.running import SUPPORT, Run, relax

pytestmark = pytest.mark.slow
ADAPTER = SUPPORT / "tiny_adapter.toml"
UNSOLVED = "reward.function=tiny_tasks.never_parsed"
FAULTS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "reward_that_parses_nothing": (
        (UNSOLVED, "trainer.weight_decay=0"),
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
    "positions_that_differ": (
        ("rollout.backend=wrong_engines.WrongPositions",),
        {"disagreement_by_depth"},
    ),
    "prefix_of_earlier_weights": (
        ("rollout.backend=wrong_engines.StalePrefix",),
        {"disagreement_by_depth"},
    ),
    "stop_token_that_never_comes": (
        ("rollout.max_tokens=24", "rollout.min_tokens=24", UNSOLVED),
        {"never_ends"},
    ),
    "samples_without_randomness": (
        ("rollout.backend=wrong_engines.SameRandomNumbers",),
        {"identical_samples", "groups_without_signal"},
    ),
    "reward_that_is_forged": (
        (
            'reward.function={"tiny_tasks.forged"=1.0, "tiny_tasks.never_parsed"=1.0}',
            *("data.function=tiny_tasks.doubled", "data.shuffle=false"),
        ),
        {"reward_out_of_range", "dead_component", "doubled_begin"},
    ),
    "end_token_left_out": (
        (
            *("rollout.backend=wrong_engines.WithoutEnd", "rollout.max_tokens=24"),
            *("trainer.learning_rate=1e-60", "trainer.max_grad_norm=1e-5"),
        ),
        {"ends_differ", "weights_unchanged", "gradient_clipped"},
    ),
    "reward_that_ends_its_process": (
        (
            *("reward.function=tiny_tasks.poison_exit", "data.shuffle=false"),
            *("supervision.max_failures=1", "supervision.intensity=50"),
        ),
        {"restart_loop", "quarantine_grows"},
    ),
    "policy_that_collapses": (
        (
            *("reward.function=tiny_tasks.half_of_sevens", "trainer.learning_rate=1e-1"),
            *("roles.reference.replicas=1", "algorithm.kl.place=loss", "algorithm.kl.coefficient=1e-6"),
            *("eval.rows=4", "eval.every=3", "eval.reward=tiny_tasks.never_parsed"),
            *("eval.data.kind=python", "eval.data.size=4", "eval.data.function=tiny_tasks.make"),
        ),
        {"entropy_collapse", "kl_drift", "reward_without_evaluation"},
    ),
    "too_many_updates_of_a_batch": (
        ("trainer.minibatches=2", "trainer.epochs=4", "trainer.learning_rate=5e-2", "algorithm.proximal=trainer"),
        {"many_clipped"},
    ),
    "actor_slower_than_its_peers": (
        ("rollout.backend=wrong_engines.SlowThird", "rollout.replicas=3", "rollout.max_concurrent_prompts=1"),
        {"stragglers"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named_within_ten_steps(make_run: Callable[..., Run], fault: str) -> None:
    settings, rules = FAULTS[fault]
    check_named(make_run(fault, *settings, "run.steps=10", "staleness.max=0"), rules)


def test_adapter_that_never_arrives_is_named(make_run: Callable[..., Run], tmp_path: Path) -> None:
    sampled = ("rollout.group_size=4", "rollout.max_tokens=6", "reward.function=tiny_tasks.share_of_sevens")
    never = ("rollout.backend=wrong_engines.NeverUpdated", "trainer.learning_rate=5e-2", "lora.dropout=0")
    given = (f"model.path={base_folder(tmp_path)}", *sampled, *never, "run.steps=10", "staleness.max=0")
    check_named(make_run("adapter", *given, config=ADAPTER), {"weights_not_refreshed"})


def check_named(run: Run, rules: set[str]) -> None:
    """Complete a run, and check that doctor names faults, each with evidence and a remedy."""
    run.complete()
    done = relax("doctor", str(run.folder.root), "--json", cwd=run.cwd)
    body = json.loads(done.stdout)
    assert done.returncode == 1
    assert rules <= {finding["rule"] for finding in body["findings"]}, body
    for finding in body["findings"]:
        assert finding["remedy"] or not finding["rule"]
        assert finding["evidence"] or not finding["rule"]
