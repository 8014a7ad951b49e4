"""Changed settings at the resumption of a run: the effect of each, and how it is shown."""

from __future__ import annotations

import pytest

from relax_actors.config import load_config
from relax_actors.supervision.resume import Change, Effect, compare, continues, needs_new_start
from tests.support.running import TINY

ADDED = '{"actor": "reference", "replicas": 1, "deadline": 60.0, "isolation": "none"}'


def changes(old: list[str], new: list[str]) -> list[Change]:
    # The folder is saved as an absolute path.
    return [change for change in compare(load_config(TINY, old), load_config(TINY, new)) if change.key != "run.folder"]


@pytest.mark.parametrize(
    ("setting", "effect", "shown"),
    [
        ("supervision.intensity=9", Effect.NONE, "supervision.intensity: 5 -> 9"),
        ("rollout.replicas=2", Effect.NONE, "rollout.replicas: 1 -> 2"),
        ("rollout.spot_backlog=2", Effect.NONE, "rollout.spot_backlog: not set -> 2"),
        ("reward.deadline=5", Effect.NONE, "reward.deadline: 60.0 -> 5.0"),
        ("trainer.checkpoint_every=9", Effect.NONE, "trainer.checkpoint_every: 3 -> 9"),
        ("broker.url=nats://a:b@c:1", Effect.NONE, 'broker.url: not set -> "nats://***@c:1"'),
        ("data.path=moved", Effect.CONTENT, 'data.path: not set -> "moved"'),
        ("run.steps=9", Effect.RESULT, "run.steps: 8 -> 9"),
        ("run.epochs=3", Effect.RESULT, "run.epochs: not set -> 3"),
        ("trainer.precision=bfloat16", Effect.REFUSED, 'trainer.precision: "float32" -> "bfloat16"'),
        (
            "reward.function=exact_match",
            Effect.REFUSED,
            'reward.function: "tiny_tasks.share_of_sevens" -> "exact_match"',
        ),
        (
            "advantages.reads=nothing",
            Effect.REFUSED,
            'advantages.reads: "reward" -> "nothing" (only to the column of a role that is added with it)',
        ),
        (
            "roles.reference={}",
            Effect.REFUSED,
            f"roles.reference: not set -> {ADDED} (it needs weights 0)",
        ),
        (
            "roles.actor_fwd={}",
            Effect.REFUSED,
            f"roles.actor_fwd: not set -> {ADDED.replace('reference', 'actor_fwd')} (it needs old weights)",
        ),
    ],
)
def test_each_changed_setting_has_an_effect(setting: str, effect: Effect, shown: str) -> None:
    (change,) = changes([], [setting])
    assert (change.effect, str(change)) == (effect, shown)
    assert changes([setting], [setting]) == []


def test_autoscaler_and_token_of_operators_may_change() -> None:
    gateway = ["gateway.host=127.0.0.1"]
    for old, new in (
        ([], ["autoscaler.max=2"]),
        (["autoscaler.max=2"], ["autoscaler.max=4", "autoscaler.min=2"]),
        (gateway, [*gateway, "gateway.operator_token_file=token"]),
    ):
        found = changes(old, new)
        assert found
        assert {change.effect for change in found} == {Effect.NONE}


def test_role_is_left_out_if_no_other_role_reads_its_column() -> None:
    observer = ["roles.shaped.actor=tiny_tasks.Shaped"]
    assert [change.effect for change in changes(observer, [])] == [Effect.RESULT]
    needed = changes([*observer, "advantages.reads=shaped_reward"], [])
    assert [(change.key, change.effect) for change in needed][1:] == [("roles.shaped", Effect.REFUSED)]
    assert "advantages" in needed[1].reason


def test_added_role_may_write_the_column_that_advantages_read() -> None:
    settings = ["roles.shaped.actor=tiny_tasks.Shaped", "advantages.reads=shaped_reward"]
    assert [change.effect for change in changes([], settings)] == [Effect.RESULT, Effect.RESULT]
    assert [change.effect for change in changes(settings, [])] == [Effect.REFUSED, Effect.REFUSED]
    # Rows in flight whose column exists already would never reach the advantages again.
    (back,) = changes(settings, settings[:1])
    assert (back.key, back.effect) == ("advantages.reads", Effect.REFUSED)


@pytest.mark.parametrize(
    ("schedule", "old", "new", "reason"),
    [
        (["trainer.schedule=cosine"], 8, 9, 'trainer.schedule = "cosine" decays over run.steps'),
        (["trainer.warmup_steps=9"], 8, 20, "trainer.warmup_steps = 9 is cut to run.steps"),
        (["trainer.warmup_steps=9"], 20, 8, "trainer.warmup_steps = 9 is cut to run.steps"),
        (["trainer.warmup_steps=8"], 8, 20, ""),
    ],
)
def test_number_of_steps_changes_only_if_no_learning_rate_depends_on_it(
    schedule: list[str], old: int, new: int, reason: str
) -> None:
    found = changes([*schedule, f"run.steps={old}"], [*schedule, f"run.steps={new}"])
    assert [change.reason for change in found] == [reason]
    assert continues(found) == (new > old and not reason)
    # A run that has not trained starts from nothing, with the schedule of the new number of steps.
    assert needs_new_start(found) == bool(reason)


def test_finished_run_does_not_continue_with_another_objective() -> None:
    assert not continues(changes([], ["run.steps=9", "algorithm.clip_low=0.1"]))
    assert not continues(changes([], ["supervision.intensity=9"]))
