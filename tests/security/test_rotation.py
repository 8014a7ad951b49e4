"""`relax keys --rotate` while a run is up: its processes sign in again, and the credentials before are refused."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from broker.address import Address
from broker.connection import Connection
from broker.errors import BrokerError
from broker.listeners import Settings
from tests.support.guarded import MakeGuarded
from tests.support.running import Run, wait_until

NAME, STEPS = "rotated", 20


def is_refused(address: Address) -> bool:
    try:
        Connection(address, "thief", 2.0).close()
    except BrokerError as error:
        return "refuses these credentials" in str(error)
    return False


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rotated_keys_lose_no_row_of_a_run_that_is_up(make_guarded: MakeGuarded, make_run: Callable[..., Run]) -> None:
    guarded = make_guarded([f"run.name={NAME}"])
    guarded.make()
    guarded.start()
    assert guarded.process is not None
    url = f"broker.url=nats://127.0.0.1:{guarded.port}"
    run = make_run(NAME, f"run.steps={STEPS}", url, f"broker.credentials={guarded.keys}").start()
    for step in (3, 12):
        wait_until(partial(run.table.get, f"relax.{NAME}.batch.{step}"), f"batch.{step}", 120)
        run.disconnect()
        before = guarded.keys.with_name(f"stolen{step}")
        shutil.copytree(guarded.keys, before)
        guarded.make(Settings(rotate=True))
        guarded.process.send_signal(signal.SIGHUP)
        for user in ("trainer", "rollout", "node", "operator", "observer"):
            old = replace(guarded.address(user), credentials=str(before / user / "nats.creds"))
            wait_until(partial(is_refused, old), f"refusal of the stolen credentials of {user}")
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["admitted"], result["trained"]) == (4 * STEPS, 4 * STEPS)
