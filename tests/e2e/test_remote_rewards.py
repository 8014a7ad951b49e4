"""A service that fails, is slow, ends and comes back costs time alone: the weights are those of a local reward."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.equivalence import final_weights
from tests.support.http_services import answered, http_service
from tests.support.running import Run, wait_until
from tests.support.tiny_tasks import share_of_sevens

ON_POLICY = ("staleness.max=0", "run.deterministic=true")


def score(body: Any) -> list[float]:
    return [share_of_sevens(completion, None) for completion in body["completions"]]  # type: ignore[arg-type]


@pytest.mark.slow
def test_no_row_gets_a_wrong_reward_from_a_service_that_fails_and_ends(make_run: Callable[..., Run]) -> None:
    local = make_run("local", *ON_POLICY)
    expected = final_weights(local, local.complete())
    calls, failed = itertools.count(), threading.Event()

    def answer(body: Any, _: dict[str, str]) -> tuple[int, bytes]:
        call = next(calls)
        if call % 10 in (2, 5, 8):
            failed.set()
            return (503, b"busy") if call % 20 < 10 else (200, b'{"rewards": []}')
        if call % 10 == 6:
            time.sleep(0.2)
        return answered({"rewards": score(body)})

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = f'reward.options={{remote={{url="http://127.0.0.1:{port}", seconds=2.0}}}}'
    run = make_run("remote", *ON_POLICY, "reward.function=remote", options, "supervision.max_failures=50")
    with http_service(answer, port):
        run.start()
        wait_until(failed.is_set, "a failed call", 120)
        wait_until(lambda: run.table.get(f"relax.{run.name}.batch.1"), "step 1", 120)
        run.kill("reward.0")
        wait_until(lambda: run.table.get(f"relax.{run.name}.batch.2"), "step 2", 120)
    time.sleep(3)  # longer than all tries of a call
    with http_service(answer, port):
        run.disconnect()
        code, result, said = run.finish()
    assert code == 0, said
    assert final_weights(run, result) == expected
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
