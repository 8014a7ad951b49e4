"""What a user reads about failures: sentences, counted lines, the live view."""

from __future__ import annotations

import pytest

from relax_actors.monitoring.failures import LINE_SECONDS, MAX_KEYS, MAX_ROLES, FailureCounts, sentence
from relax_actors.monitoring.live_view import LABELS, LiveView
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.progress import TRAINING, Progress
from relax_actors.monitoring.screen import Screen
from tests.support.log_messages import event, metric
from tests.support.messages import assert_says


def shown(progress: Progress, width: int = 120) -> str:
    """Return the text of the live view, with the lines of a wrapped text joined."""
    screen = Screen(width=width)
    with screen.capture() as captured:
        screen.print(LiveView(progress))
    lines = captured.get().splitlines()
    assert all(len(line) <= width for line in lines)
    return " ".join(" ".join(line.strip("│ ") for line in lines).split())


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (event("crashed", reason="no progress for 1.2 s"), "reward.0 crashed: no progress for 1.2 s; it is restarted"),
        (event("down", "broker", reason="killed by SIGKILL"), "broker crashed: killed by SIGKILL; it is restarted"),
        (event("repaired", "broker", seconds=1.5, restarts=1), "broker recovered after 1.5 s"),
        (
            event("row_quarantined", row="group.1.2", error="ValueError: no\nmore"),
            "group.1.2 failed for good in reward: ValueError: no",
        ),
        (
            event("row_failed", row="group.1.2", failures=1, error="ValueError: no"),
            "group.1.2 failed in reward and is tried again: ValueError: no",
        ),
        (
            event("row_lost", "root", row="group.1.2", by="reward", error="RowLost: it was acknowledged"),
            "group.1.2 is delivered to reward again: RowLost: it was acknowledged",
        ),
        (
            event("row_dropped", row="group.1.2", reason="no_signal", detail="all 4 samples scored 0"),
            "group.1.2 dropped (no_signal): all 4 samples scored 0",
        ),
        (
            event("agent_without_reward", "rollout", session="group-1-2-0-0"),
            "the agent of session group-1-2-0-0 ended without a reward",
        ),
        (
            event("repair_failed", "root", error="KeyError: 7"),
            "root.0 cannot look for lost rows, and tries again: KeyError: 7",
        ),
        (
            event("crashed", reason="no sign of life", version="of its own"),
            "reward.0 crashed: no sign of life; it is restarted",
        ),
        (event("gave_up", reason="six failures"), "reward.0 cannot be kept running: six failures"),
        (event("fault", "chaos", target="rollout.0", pid=1), "relax chaos hits rollout.0"),
        (event("ready", seconds=1.0), ""),
    ],
)
def test_event_is_a_sentence(body: LogMessage, text: str) -> None:
    assert sentence(body) == text


def test_lost_and_kept_rows_count_for_the_role_that_the_root_names() -> None:
    counts = FailureCounts()
    counts.take(event("row_lost", "root", row="group.1.2", by="reward", error="RowLost: it was acknowledged"))
    counts.take(event("row_lost", "rollout", row="group.1.3", by="reward", error="RowLost: forged"))
    counts.take(event("row_kept", "root", row="group.1.4", by="judge", error="RowKept: its actors waited"))
    assert [line.partition(":")[0] for line in counts.lines()] == ["reward", "rollout", "judge"]


def test_failures_of_one_error_are_one_line_that_is_printed_now_and_then() -> None:
    counts = FailureCounts()
    counts.take(event("row_failed", error="ValueError: 'a'"))
    assert counts.due(0.0) == ["reward: 1 failure tried again: ValueError: 'a'"]
    for i in range(36):
        counts.take(event("row_quarantined", error=f"ValueError: '{i}'"))
    assert counts.due(1.0) == []
    assert counts.due(LINE_SECONDS) == ["reward: 36 rows quarantined, 1 failure tried again: ValueError: '35'"]
    assert counts.due(9 * LINE_SECONDS) == []
    counts.take(event("suppressed", of="row_quarantined", count=100, seconds=5))
    assert counts.lines() == ["reward: 136 rows quarantined, 1 failure tried again: ValueError: '35'"]


def test_crashes_are_counted_by_role() -> None:
    counts = FailureCounts()
    counts.take(event("crashed", n=1, reason="no progress for 60.1 s while handling group.0.3"))
    assert counts.lines() == ["reward.1 crashed: no progress for 60.1 s while handling group.0.3; it is restarted"]
    counts.take(event("crashed", n=0, reason="killed by SIGKILL"))
    assert counts.lines() == ["reward crashed 2 times, the last time reward.0: killed by SIGKILL; it is restarted"]


def test_number_of_lines_is_bounded() -> None:
    counts = FailureCounts()
    for i in range(10 * MAX_KEYS):
        counts.take(event("row_quarantined", "flooding", error=f"Error{i}: why"))
    for i in range(2 * MAX_ROLES):
        counts.take(event("crashed", f"role{i}", reason="why"))
        counts.take(event("row_quarantined", f"role{i}", error=f"Error{i}: why"))
    lines = counts.lines()
    assert len([line for line in lines if line.startswith("flooding")]) == MAX_KEYS + 1
    assert len(lines) <= MAX_KEYS + 2 * MAX_ROLES + 2
    assert "role0: 1 row quarantined: Error0: why" in lines


def test_live_view_says_recovered_after_crashed() -> None:
    progress = Progress("x", 10)
    progress.take(event("ready", seconds=0.5))
    progress.take(event("crashed", reason="killed by SIGKILL"))
    progress.take(event("ready", seconds=1.25))
    progress.take(event("ready", seconds=1.25))
    assert list(progress.events) == [
        "reward.0 crashed: killed by SIGKILL; it is restarted",
        "reward.0 recovered, 1.2 s after its restart",
    ]


def test_failures_of_an_earlier_attempt_are_not_shown_again() -> None:
    progress = Progress("x", 10)
    progress.take(event("row_quarantined", row="group.0.1", error="ValueError: fixed"), recent=False)
    progress.take(metric("node", kind="supervision", restarts={"reward.0": 2}), recent=False)
    assert (progress.failures.lines(), list(progress.events), progress.restarts) == ([], [], 0)


@pytest.mark.parametrize("width", [80, 120])
def test_live_view_is_whole_at_any_width(width: int) -> None:
    progress = Progress("x", 10)
    step = {"kind": "step", "step": 4, "reward": 0.5, "time": 9.0, "staleness": 1, "grad_norm": 0.25, "loss": 0.5}
    progress.take(metric("trainer", **step))
    rows = {"in_flight": 4, "trained": 20, "dropped": 1, "quarantined": 2, "lead": 1}
    progress.take(metric("prompts", **rows))
    progress.take(metric("node", kind="supervision", restarts={"reward.0": 2}))
    progress.take(event("row_quarantined", row="group.1.2", error="ValueError: no"))
    text = shown(progress, width)
    assert "…" not in text
    for line in (
        "5 of 10, 0.0 steps/s, time left unknown",
        "trained 20, in flight 4, dropped 1, quarantined 2",
        "loss 0.5, gradient norm 0.25",
        "sampled by weights up to 1 step old; generation is up to 1 step ahead of training",
        "1 up, 2 restarts: reward.0 2",
        "reward: 1 row quarantined: ValueError: no",
        "group.1.2 failed for good in reward: ValueError: no",
    ):
        assert line in text, text


def test_every_kept_figure_has_a_label() -> None:
    assert set(LABELS) == set(TRAINING)


def test_a_full_table_is_shown_with_who_fills_it_as_what_the_run_waits_for() -> None:
    assert_says(
        sentence(event("strays_removed", "trainer", cells=75, mib=300, by="rollout.0")), "75", "rollout.0", "300 MiB"
    )
    full = {"percent": 97, "max_bytes": 1 << 30}
    by_rollout = event("table_full", "trainer", **full, by="rollout.0")
    text = "the table is 97 % full of strays by rollout.0; stop it, or rotate its keys"
    assert sentence(by_rollout) == text
    assert_says(sentence(event("table_full", "trainer", **full, by="")), "97 %", "broker.max_bytes")
    progress = Progress("demo", 4)
    progress.take(by_rollout, recent=False)
    assert progress.waits_for == ""
    progress.take(by_rollout)
    assert progress.waits_for == text
    assert progress.line().endswith(f"; waiting: {text}")
    progress.notice = "the broker does not answer"
    assert progress.waits_for == "the broker does not answer"
