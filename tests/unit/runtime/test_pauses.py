"""Detection of pauses: a pause differs from a small delay and from work."""

from __future__ import annotations

from relax_actors.runtime.pauses import PauseDetector, tolerated_delay


def test_gap_above_the_threshold_is_a_pause() -> None:
    pauses = PauseDetector(3.0)
    assert [pauses.check(now) for now in (100.0, 101.0, 104.0, 114.0, 115.0)] == [0.0, 0.0, 0.0, 10.0, 0.0]


def test_busy_caller_is_not_paused() -> None:
    pauses = PauseDetector(3.0)
    pauses.check(0.0)
    assert pauses.check(10.0, worked=9.0) == 0.0
    assert pauses.check(20.0, worked=0.1) == 10.0


def test_tolerated_delay_and_beat_stay_below_the_heartbeat() -> None:
    for heartbeat in (1.0, 10.0, 60.0):
        beat = min(1.0, heartbeat / 4)
        assert tolerated_delay(heartbeat) + beat < heartbeat
