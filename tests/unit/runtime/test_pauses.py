"""Standing still is told from being late, and from being busy."""

from __future__ import annotations

from relax_actors.runtime.pauses import PauseDetector, tolerated_delay


def test_a_pause_is_a_gap_between_two_looks_that_is_longer_than_usual() -> None:
    pauses = PauseDetector(3.0)
    assert [pauses.check(now) for now in (100.0, 101.0, 104.0, 114.0, 115.0)] == [0.0, 0.0, 0.0, 10.0, 0.0]


def test_who_is_busy_does_not_stand_still() -> None:
    pauses = PauseDetector(3.0)
    pauses.check(0.0)
    assert pauses.check(10.0, worked=9.0) == 0.0
    assert pauses.check(20.0, worked=0.1) == 10.0


def test_what_is_shorter_than_unusual_is_no_death() -> None:
    for heartbeat in (1.0, 10.0, 60.0):
        beat = min(1.0, heartbeat / 4)
        assert tolerated_delay(heartbeat) + beat < heartbeat
