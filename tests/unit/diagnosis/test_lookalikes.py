"""Figures that resemble a fault: rules are silent, or name the true cause."""

from __future__ import annotations

from typing import Any

import pytest

from relax_actors.monitoring.diagnosis import RULES, Finding, Observations, diagnose
from relax_actors.monitoring.diagnosis.rule import rule
from tests.support.log_messages import event
from tests.support.recorded_runs import alter, happen, read, recorded


def problems_of(seen: Observations) -> set[str]:
    return {finding.rule for finding in diagnose(seen) if finding.is_problem}


def finding_of(seen: Observations, name: str) -> Finding:
    (match,) = [finding for finding in diagnose(seen) if finding.rule == name]
    return match


def with_settings(seen: Observations, **settings: Any) -> Observations:
    """Return observations with other settings; sections are merged."""
    own = {name: {**(seen.settings.get(name) or {}), **value} for name, value in settings.items()}
    seen.settings = {**seen.settings, **own}
    return seen


def dropping(*reasons: str) -> Observations:
    """Return a run that drops most rows, some of them with an event."""
    seen = recorded("on_policy", 10)
    read(seen, "prompts.0", admitted=lambda k: 10.0 * k, dropped=lambda k: 8.0 * k)
    for reason in reasons:
        happen(seen, "row_dropped", sender="trainer.0", text=reason)
    return seen


@pytest.mark.parametrize(
    ("main", "remedy"),
    [
        ("too_old", "staleness.max"),
        ("no_signal", "got the same reward"),
        ("truncated", "rollout.max_tokens"),
        ("lost_segment", "disk"),
        ("my_reason", "relax tail"),
    ],
)
def test_reason_of_most_dropped_rows_decides_the_remedy(main: str, remedy: str) -> None:
    finding = finding_of(dropping(main, "surplus", main), "wasted_rows")
    assert f"{main} 2, surplus 1" in finding.text
    assert remedy in finding.remedy
    assert finding.is_problem


def test_memory_that_falls_to_a_level_and_stays_there_does_not_run_out() -> None:
    seen = recorded("on_policy")
    read(seen, "node.0", 600, memory_free_mib=lambda k: max(800.0, 9000.0 - 40 * k))
    assert "memory_runs_out" not in {finding.rule for finding in diagnose(seen)}


def test_reason_is_read_from_the_event_of_a_dropped_row() -> None:
    seen = dropping()
    body = {"row": "group.1.0", "reason": "too_old", "detail": "staleness 3 is over staleness.max"}
    seen.take(event("row_dropped", "trainer", **body), 1e9)
    assert "too_old 1" in finding_of(seen, "wasted_rows").text


def test_rows_that_dynamic_sampling_drops_are_a_note() -> None:
    seen = with_settings(dropping("no_signal"), algorithm={"shaping": {"filter_zero_variance": True}})
    assert not finding_of(seen, "wasted_rows").is_problem
    happen(seen, "row_dropped", 2, sender="trainer.0", text="too_old")
    assert finding_of(seen, "wasted_rows").is_problem


@pytest.mark.parametrize("first", [0.4, 1.0])
def test_run_that_has_learned_its_task_has_no_problem(first: float) -> None:
    seen = recorded("on_policy", 10)
    alter(seen, reward=lambda step: first if step < 3 else 1.0, no_signal=1.0, grad_norm=0.0)
    seen.fingerprints = dict.fromkeys(seen.fingerprints, "5d63aa5e964a4abe80c8943ffc12e71a")
    assert problems_of(seen) == set()
    assert not finding_of(seen, "saturated_reward").is_problem


def test_dropout_of_an_adapter_moves_log_probs_less_than_weights_that_never_arrive() -> None:
    seen = recorded("on_policy", 10)
    alter(seen, abs_delta=lambda step: 0.0 if step == 0 else 0.15)
    assert "weights_not_refreshed" in problems_of(seen)
    dropping = with_settings(seen, lora={"dropout": 0.1})
    assert "weights_not_refreshed" not in problems_of(dropping)
    alter(dropping, abs_delta=lambda step: 0.0 if step == 0 else 0.8)
    assert "weights_not_refreshed" in problems_of(dropping)


def test_steps_without_signal_do_not_hide_a_lost_gradient() -> None:
    seen = recorded("on_policy", 10)
    alter(seen, grad_norm=0.0, no_signal=lambda step: float(step == 4))
    assert "no_gradient" in problems_of(seen)


@pytest.mark.parametrize("section", ["agent", "environment"])
def test_rewards_of_players_that_add_up_to_a_constant_are_not_flat(section: str) -> None:
    seen = recorded("episodes", 10)
    alter(seen, reward=0.0, no_signal=0.1)
    assert "flat_reward" in problems_of(seen)
    assert "flat_reward" not in problems_of(with_settings(seen, **{section: {"players": ["white", "black"]}}))
    alter(seen, no_signal=1.0)
    assert "flat_reward" in problems_of(seen)


def crashed(seen: Observations, at: float, **fields: Any) -> None:
    seen.take(event("crashed", "reward", reason="killed by SIGKILL", **fields), at)


def test_kills_from_outside_are_no_crash_loop() -> None:
    seen = Observations("x", {})
    for k in range(5):
        crashed(seen, 1e9 + k, blame="external")
    assert diagnose(seen) == []
    for k in range(3):
        crashed(seen, 1e9 + 9 + k, blame="rows")
    assert "3 times" in finding_of(seen, "restart_loop").text


def test_crash_loop_expires() -> None:
    seen = Observations("x", {})
    for k in range(3):
        crashed(seen, 1e9 + k)
    assert problems_of(seen) == {"restart_loop"}
    seen.take(event("ready"), 1e9 + 700)
    assert problems_of(seen) == set()


def test_rule_that_fails_is_a_note_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    @rule("Never holds.")
    def broken(seen: Observations) -> Any:
        raise ZeroDivisionError(seen.run)

    load = RULES.load
    monkeypatch.setattr(RULES, "load", lambda name, where: broken if name == "stragglers" else load(name, where))
    seen = recorded("on_policy", 10)
    alter(seen, reward=0.0)
    note = finding_of(seen, "stragglers")
    assert "rule stragglers failed: ZeroDivisionError" in note.text
    assert not note.is_problem
    assert "flat_reward" in problems_of(seen)


def test_entropy_without_rewards_is_read_without_an_error() -> None:
    seen = recorded("on_policy", 10)
    alter(seen, entropy_proxy=lambda step: 2.0 if step < 4 else 0.01)
    for figures in seen.steps.values():
        figures.pop("reward", None)
    assert not [finding for finding in diagnose(seen) if "failed" in finding.text]


def test_answers_of_one_token_need_no_end() -> None:
    seen = recorded("on_policy", 10)
    alter(seen, truncated=1.0)
    assert "never_ends" not in {each.rule for each in diagnose(with_settings(seen, rollout={"max_tokens": 1}))}


def test_answers_of_a_fixed_length_are_a_note_while_their_rewards_differ() -> None:
    seen = recorded("on_policy", 10)
    alter(seen, truncated=1.0, no_signal=0.0)
    assert not finding_of(seen, "never_ends").is_problem
    alter(seen, no_signal=1.0)
    assert finding_of(seen, "never_ends").is_problem


@pytest.mark.parametrize("section", ["agent", "gateway"])
def test_conversations_of_clients_end_in_any_token(section: str) -> None:
    seen = recorded("on_policy", 10)
    alter(seen, end_share=0.2)
    assert "ends_differ" in problems_of(seen)
    assert "ends_differ" not in problems_of(with_settings(seen, **{section: {"host": "127.0.0.1"}}))


def test_the_rounding_of_quantised_servers_is_no_disagreement() -> None:
    seen = with_settings(recorded("on_policy"), rollout={"sglang": {"quantization": "fp8"}})
    alter(seen, abs_delta=0.2)
    assert "engines_disagree" not in problems_of(seen)
    alter(seen, abs_delta=0.3)
    assert "engines_disagree" in problems_of(seen)
