"""Every rule names the fault that it is about, planted in the figures of a real run, and is silent without it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from relax_actors.config import Config
from relax_actors.monitoring.diagnosis import RULES, Observations, Reading, diagnose
from relax_actors.monitoring.log_message import LogMessage
from tests.support.log_messages import metric
from tests.support.recorded_runs import NAMES, alter, happen, read, recorded

LIMITS = {"starved_trainer", "idle_rollouts"}
"""Notes on what limits the speed of a run, which are true of healthy ones."""
WITHIN = 10
"""Steps within which most faults are named."""
Fault = Callable[[Observations], None]
Value = float | Callable[[int], float]
FAULTS: dict[str, tuple[str, int | None, Fault]] = {}
"""By rule: the recorded run, how many of its first steps are kept, and what the fault does."""


def fault(rule: str, run: str = "on_policy", steps: int | None = WITHIN) -> Callable[[Fault], Fault]:
    """Register a fault under the rule that names it."""

    def register(plant: Fault) -> Fault:
        FAULTS[rule] = (run, steps, plant)
        return plant

    return register


def each(**figures: Value) -> Fault:
    """A fault that changes figures of every step."""
    return lambda seen: alter(seen, **figures)


fault("restart_loop")(lambda seen: happen(seen, "crashed", 3, text="ValueError: no number"))
fault("quarantine_grows")(lambda seen: happen(seen, "row_quarantined", 6, text="ValueError: no number"))
fault("rows_retried")(lambda seen: happen(seen, "row_failed", 6, text="TimeoutError"))
fault("failing_episodes", "episodes")(lambda seen: happen(seen, "environment_failed", 20, sender="environment.0"))
fault("replay_differs")(lambda seen: happen(seen, "replay_diverged", sender="trainer.0"))
fault("damaged_files")(lambda seen: happen(seen, "weights_corrupt", 2, sender="rollout.0"))
fault("foreign_messages")(lambda seen: happen(seen, "malformed_cell", 5, sender="trainer.0"))


@fault("clocks_differ")
def clock_behind(seen: Observations) -> None:
    for k in range(12):
        seen.take(metric("judge", time=1e9 + k, rows=1), 1e9 + k + 90)


@fault("starved_trainer", steps=None)
def slow_rollouts(seen: Observations) -> None:
    alter(seen, starved_seconds=9.0, waited_seconds=9.1, train_seconds=0.5)
    read(seen, "rollout.0", busy=lambda _: 0.98)


@fault("idle_rollouts", steps=None)
def slow_trainer(seen: Observations) -> None:
    alter(seen, starved_seconds=0.0, waited_seconds=0.1, train_seconds=5.0)
    read(seen, "rollout.0", busy=lambda _: 0.1)


@fault("slow_role", steps=None)
def slow_reward(seen: Observations) -> None:
    alter(seen, starved_seconds=9.0, waited_seconds=9.1, train_seconds=0.5)
    read(seen, "rollout.0", busy=lambda _: 0.2)
    read(seen, "reward.0", busy=lambda _: 1.0)


@fault("weights_lag")
def rollout_with_old_weights(seen: Observations) -> None:
    read(seen, "trainer.0", version=float)
    read(seen, "rollout.0", version=lambda _: 0.0, rows=float)


@fault("stragglers")
def slow_actor(seen: Observations) -> None:
    for n in range(4):
        seconds = 2.0 if n == 3 else 1.0
        readings = (Reading(1e9 + k, {"tokens": 100.0, "seconds": seconds}) for k in range(30))
        seen.generated[f"rollout.{n}"] = deque(readings)


fault("slower_steps", steps=None)(each(tokens=200.0, train_seconds=lambda step: 0.1 * (1 + step / 4)))


@fault("wasted_rows")
def tasks_that_are_too_hard(seen: Observations) -> None:
    read(seen, "prompts.0", admitted=lambda k: 10.0 * k, dropped=lambda k: 8.0 * k)


fault("flat_reward")(each(reward=0.0))
fault("groups_without_signal")(each(no_signal=0.9, reward=lambda step: 0.1 * (step % 2)))
fault("saturated_reward")(each(no_signal=1.0, reward=lambda step: min(1.0, 0.5 + 0.1 * step)))
fault("reward_collapse", steps=None)(each(reward=lambda step: 0.1 + 0.04 * (step if step < 20 else 40 - step)))


@fault("dead_component")
def format_that_nobody_gets(seen: Observations) -> None:
    alter(seen, **{"reward/format": 0.0, "reward/answer": lambda step: 0.1 + 0.01 * step})


@fault("traded_components", steps=None)
def format_for_answers(seen: Observations) -> None:
    alter(seen, **{"reward/format": lambda step: 0.02 * step, "reward/answer": lambda step: 0.9 - 0.02 * step})


fault("reward_out_of_range")(each(reward=lambda step: 100.0 if step == 8 else 0.2))


@fault("shortcut")
def answer_without_work(seen: Observations) -> None:
    alter(
        seen,
        reward=lambda step: 1.0 if step >= 6 else 0.1 + 0.01 * step,
        length_mean=lambda step: 4.0 if step >= 6 else 40.0,
    )


fault("never_ends")(each(truncated=1.0))
fault("length_at_cap")(each(truncated=lambda step: 0.1 if step < 3 else 0.95))
fault("end_not_trained", "examples")(each(end_trained=0.0))
fault("ends_differ")(each(end_share=0.2))
fault("marks_in_texts")(each(marked=0.6))
fault("doubled_begin")(each(prompt_doubled=1.0))
fault("repetitive_texts")(each(repetitive=0.5))
fault("identical_samples")(each(distinct=0.25))


@fault("length_bias")
def longer_wrong_answers(seen: Observations) -> None:
    alter(
        seen,
        length_mean=lambda step: 10.0 + 2 * step,
        length_worse=lambda step: 12.0 + 2 * step,
        length_better=lambda step: 8.0 + step,
        reward=lambda step: 0.3 + 0.001 * (step % 3),
    )


fault("engines_disagree")(each(abs_delta=0.3))
fault("weights_not_refreshed")(each(abs_delta=lambda step: 1e-6 + 0.03 * step))


@fault("disagreement_by_depth")
def wrong_positions(seen: Observations) -> None:
    alter(seen, abs_delta_early=1e-4, abs_delta_late=0.2)


fault("kl_drift", "episodes")(each(kl=lambda step: 0.2 * step))
fault("ratio_drift")(each(ratio=1.0, ratio_squared=8.0))
fault("many_clipped")(each(clipped=0.5))
fault("many_rejected")(each(rejected=12.0))
fault("rerouted_experts")(each(rerouted=0.5))
fault("teacher_not_followed", steps=None)(each(teacher_kl=lambda step: 0.4 + 0.001 * step))


@fault("weights_unchanged")
def updates_lost_in_rounding(seen: Observations) -> None:
    seen.fingerprints = dict.fromkeys(seen.fingerprints, "5d63aa5e964a4abe80c8943ffc12e71a")


fault("no_gradient")(each(grad_norm=0.0))
fault("gradient_clipped")(each(grad_norm=400.0))
fault("gradient_spikes")(each(grad_norm=lambda step: 90.0 if step in (4, 7) else 1.0))
fault("entropy_collapse")(each(entropy_proxy=lambda step: 2.0 if step < 4 else 0.01))


@fault("entropy_explosion")
def policy_dissolves(seen: Observations) -> None:
    alter(seen, entropy_proxy=lambda step: 0.5 + 0.3 * step, reward=lambda step: 0.5 - 0.05 * step)


fault("skipped_updates")(each(skipped_updates=1.0))


@fault("loss_by_micro_batches")
def sum_that_is_not_divided(seen: Observations) -> None:
    alter(seen, micro_batches=lambda step: 1.0 + step * 7 % 4, grad_norm=lambda step: 0.5 + 0.5 * (step * 7 % 4))


@fault("blind_critic", "critic", None)
def values_without_meaning(seen: Observations) -> None:
    for figures in seen.critic.values():
        figures["explained_variance"] = -0.4


@fault("reward_without_evaluation")
def forged_reward(seen: Observations) -> None:
    alter(seen, reward=lambda step: 0.1 * step)
    seen.evaluations = {0: 0.2, 5: 0.2, 10: 0.19}


@fault("evaluation_fell")
def overtrained(seen: Observations) -> None:
    seen.evaluations = {0: 0.2, 5: 0.6, 10: 0.4, 15: 0.3}


fault("memory_grows")(lambda seen: read(seen, "reward.0", 600, rss_mib=lambda k: 400.0 + k))
fault("memory_runs_out")(lambda seen: read(seen, "node.0", 600, memory_free_mib=lambda k: 9000.0 - 10 * k))
fault("disk_fills")(lambda seen: read(seen, "node.0", 600, disk_free_mib=lambda k: 9000.0 - 10 * k))


def names_of(seen: Observations) -> set[str]:
    return {finding.rule for finding in diagnose(seen)}


def test_every_rule_has_a_planted_fault() -> None:
    assert set(FAULTS) == set(RULES.names())


@pytest.mark.parametrize("rule", FAULTS)
def test_planted_fault_is_named(rule: str) -> None:
    run, steps, plant = FAULTS[rule]
    seen = recorded(run, steps)
    assert rule not in names_of(seen)
    plant(seen)
    (finding, *_) = [finding for finding in diagnose(seen) if finding.rule == rule]
    assert finding.evidence
    assert all(each.subject.startswith(f"relax.{seen.run}.") for each in finding.evidence)
    assert finding.remedy
    assert finding.text[0].islower() or finding.text[0].isdigit()
    for setting in finding.settings:
        assert is_setting(setting), setting


def is_setting(name: str) -> bool:
    """Whether a dotted name is one of the configuration's."""
    model: Any = Config
    for part in name.split("."):
        fields = getattr(model, "model_fields", None)
        if fields is None or part not in fields:
            return name.startswith("roles.")
        kinds = [fields[part].annotation, *getattr(fields[part].annotation, "__args__", ())]
        model = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return True


@pytest.mark.parametrize("name", NAMES)
def test_recorded_healthy_run_is_silent(name: str) -> None:
    seen = recorded(name)
    assert len(seen.steps) >= WITHIN
    assert [finding.text for finding in diagnose(seen) if finding.rule not in LIMITS] == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
def test_beginning_of_a_healthy_run_is_silent(name: str, steps: int) -> None:
    assert diagnose(recorded(name, steps)) == []


def test_messages_with_absurd_fields_are_ignored() -> None:
    seen = Observations("x", {})
    absurd: list[dict[str, Any]] = [
        {"kind": "step", "step": "7"},
        {"kind": "step", "step": -1},
        {"kind": "step", "step": 1e300, "reward": 0.5},
        {"kind": "step", "step": 3, "reward": [1]},
        {"kind": "", "busy": "much", "time": {}},
    ]
    for body in absurd:
        seen.take(LogMessage("x", "trainer", "0", str(body.get("kind", "")), body, is_event=False), 1.0)
    seen.take(LogMessage("x", "node", "0", "supervision", {"restarts": {"a": "b"}}, is_event=False), 1.0)
    seen.take(LogMessage("x", "evaluator", "0", "evaluated", {"version": "1"}, is_event=True), 1.0)
    assert seen.steps == {3: {}}
    assert seen.evaluations == {}
    assert diagnose(seen) == []
