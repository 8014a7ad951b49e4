"""The lock of a group of ranks is given to the thread that has waited longest."""

from __future__ import annotations

import threading

import pytest

from relax_actors.engines.ranks.fair_lock import FairLock
from tests.support.running import wait_until


def test_threads_get_the_lock_in_the_order_in_which_they_ask() -> None:
    lock, order = FairLock(), list[int]()

    def take(number: int) -> None:
        with lock:
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(5)]
    with lock:
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda number=number: lock.waiting == number + 1, "thread in the queue")
        assert order == []
    for thread in threads:
        thread.join(10)
    assert order == list(range(5))


def test_an_error_releases_the_lock() -> None:
    lock = FairLock()
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"), lock:
            raise ValueError("on purpose")
