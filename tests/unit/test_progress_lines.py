"""What the line of progress and the live view say while a run starts, resumes and replays."""

from __future__ import annotations

import time
from typing import Any

import pytest

from relax_actors.monitoring.leases import run_waits_for
from relax_actors.monitoring.live_view import LiveView
from relax_actors.monitoring.progress import SILENT_SECONDS, Progress
from relax_actors.monitoring.screen import Screen
from tests.support.log_messages import event, metric


def step(progress: Progress, number: int, reward: float = 0.5, at: float = 0.0, *, recent: bool = True) -> None:
    progress.take(metric("trainer", kind="step", step=number, reward=reward, time=at), recent=recent)


def idle(progress: Progress) -> Progress:
    progress.moved_at = time.monotonic() - SILENT_SECONDS - 1
    return progress


def test_run_without_a_step_has_no_reward_and_says_what_it_waits_for() -> None:
    progress = idle(Progress("x", 20))
    progress.waits = "2 of 6 actors are ready, trainer.0 not yet"
    line = progress.line()
    assert line.startswith("step 0/20 reward ? ")
    assert line.endswith("; waiting: 2 of 6 actors are ready, trainer.0 not yet")
    assert "none yet" in shown(progress)
    step(progress, 0)
    assert "waiting" not in progress.line()
    assert "reward 0.500" in progress.line()
    assert "waiting: " in idle(progress).line()


def test_resumption_is_announced_once_and_shown_until_the_trainer_has_caught_up() -> None:
    progress = Progress("x", 3000)
    step(progress, 883, recent=False)
    progress.take(event("resuming", "trainer", version=880, replays=4))
    text = "resuming from checkpoint 880, replaying 4 steps"
    assert progress.lines(0.0) == [text]
    assert progress.lines(1.0) == []
    assert progress.line().endswith(f"; waiting: {text}")
    assert text in shown(progress)
    for number in range(880, 884):
        step(progress, number)
        assert progress.waits_for == text
    progress.take(event("recovered", "trainer", version=884, replayed=4))
    assert progress.waits_for == ""
    progress.take(event("resuming", "trainer", version=880, replays=1))
    assert progress.waits_for == "resuming from checkpoint 880, replaying 1 step"
    progress.take(event("resuming", "trainer", version=884, replays=0))
    assert progress.waits_for == "resuming from checkpoint 884"


def test_malformed_and_old_resumptions_are_ignored() -> None:
    progress = Progress("x", 10)
    for fields in ({"version": "x"}, {"replays": [1]}, {"version": float("nan")}):
        progress.take(event("resuming", "trainer", **fields))
    progress.take(event("resuming", "reward", version=1, replays=1))
    progress.take(event("resuming", "trainer", version=1, replays=1), recent=False)
    assert (progress.waits_for, progress.lines(0.0)[1:]) == ("", [])


def test_replayed_steps_are_in_the_curve_once() -> None:
    progress = Progress("x", 10)
    for number, reward in [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3), (2, 0.2), (3, 0.3), (4, 0.4)]:
        step(progress, number, reward)
    assert list(progress.curve) == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert progress.step == 5


def test_rate_leaves_out_steps_of_earlier_starts_and_the_pause_between() -> None:
    progress = Progress("x", 1000)
    for number in range(10):
        step(progress, number, at=float(number), recent=False)
    assert progress.seconds_left is None
    for number in (8, 9, 10, 11):
        step(progress, number, at=90_000.0 + number)
    assert progress.steps_per_second == pytest.approx(1.0)
    assert progress.line().split("left ")[1].startswith("988 s")


def test_restarts_survive_the_restart_of_the_supervisor_that_counted_them() -> None:
    progress = Progress("x", 10)
    progress.take(metric("node", kind="supervision", restarts={"reward.0": 2}))
    progress.take(metric("root", kind="supervision", restarts={"node": 1}))
    progress.take(metric("node", kind="supervision", restarts={}))
    progress.take(metric("node", kind="supervision", restarts={"reward.0": 1, "trainer.0": 1}))
    assert progress.restarted == {"reward.0": 3, "trainer.0": 1, "node": 1}
    assert progress.restarts == 5
    assert " restarts 5 " in progress.line()
    assert "5 restarts: reward.0 3" in shown(progress)


def test_restart_counts_before_its_supervisor_reports_it() -> None:
    progress = Progress("x", 10)
    progress.take(event("restarted", "reward", starts=2), recent=False)
    progress.take(event("restarted", "reward", starts=2))
    assert progress.restarted == {"reward.0": 1}
    progress.take(metric("node", kind="supervision", restarts={"reward.0": 1, "trainer.0": 1}))
    assert progress.restarted == {"reward.0": 1, "trainer.0": 1}


HALF = {"node.0": {"children": {"a.0": {"phase": "ready"}, "b.0": {"phase": "starting"}}}}
IMPORTING = {"node.0": {"children": {"b.0": {"phase": "backing_off"}}, "zygote": {"phase": "importing"}}}
NODE = {"node.0": {"children": {"trainer.0": {"phase": "ready"}, "rollout.0": {"phase": "ready"}}}}

AWAY = {"node.0": {"children": {"rollout.0": {"phase": "ready"}}}}
MISSING = "no node has the trainer; move it to one with `relax roles move`, or start `relax node --role trainer`"


@pytest.mark.parametrize(
    ("nodes", "trainer", "text"),
    [
        ({}, None, "the actors start"),
        (HALF, None, "1 of 2 actors are ready, b.0 not yet"),
        (IMPORTING, None, "0 of 1 actors are ready, b.0 not yet, packages are being imported"),
        (NODE, None, "the trainer starts"),
        (NODE, {"waits_for": "rows of step 0"}, "the trainer is waiting for rows of step 0"),
        (NODE, {"rows": []}, "the trainer is working"),
        (AWAY, None, MISSING),
        ({"node.0": {"children": 3}, "node.1": {"children": {"a.0": "x"}}}, None, "the actors start"),
    ],
)
def test_what_a_run_waits_for_is_told_from_its_leases(nodes: dict[str, Any], trainer: Any, text: str) -> None:
    assert run_waits_for(nodes, trainer) == text


def shown(progress: Progress) -> str:
    screen = Screen(width=120)
    with screen.capture() as captured:
        screen.print(LiveView(progress))
    return captured.get()
