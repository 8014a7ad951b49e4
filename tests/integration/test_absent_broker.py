"""A process whose broker is gone, or refuses it, waits with little memory and few attempts."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree
from threading import Event

import pytest
from nats.aio.msg import Msg

from broker.address import Address
from broker.connection import Connection
from broker.errors import BrokerError, BrokerUnreachableError
from broker.listeners import Settings
from broker.permissions import OPERATOR
from broker.server import Server
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.messages import assert_says
from tests.support.running import wait_until
from tests.support.stopping_proxy import StoppingProxy

REQUESTS, LARGE = 100, bytes(64 << 10)


def futures() -> int:
    """Number of futures in this process."""
    gc.collect()
    return sum(isinstance(found, asyncio.Future) for found in gc.get_objects())


def test_requests_that_are_repeated_while_the_broker_is_gone_keep_nothing(tmp_path: Path) -> None:
    """nats-py keeps the future of each request that it can neither send nor buffer."""
    server = Server(tmp_path / "broker")
    address = server.start().for_user(OPERATOR)
    with closing(Connection(address, "test")) as connection:
        server.stop()
        wait_until(lambda: not connection.nc.is_connected, "loss of the connection")
        attempts = 0

        async def publish() -> None:
            nonlocal attempts
            attempts += 1
            await connection.js.publish("relax.t.metric.trainer.0", LARGE)

        before = futures()
        waiting = [connection.submit(connection.retry(publish, "publish")) for _ in range(REQUESTS)]
        end = time.monotonic() + 2.5
        wait_until(lambda: attempts >= 30 * REQUESTS or time.monotonic() > end, "attempts")
        assert futures() - before < 10 * REQUESTS
        for request in waiting:
            request.cancel()


def test_requests_that_nobody_serves_yet_are_repeated(address: Address) -> None:
    with closing(Connection(address, "test")) as connection:
        attempts = iter([connection.nc.jetstream(domain="absent"), connection.js])
        found = connection.retry(lambda: next(attempts).account_info(), "account")
        assert connection.call(found, 20).limits is not None
        absent = connection.nc.jetstream(domain="absent")
        with pytest.raises(BrokerUnreachableError, match=r"did not answer to account within 0\.3 s"):
            connection.call(connection.retry(absent.account_info, "account", 0.3), 20)


def test_requests_that_arrive_while_a_connection_closes_are_ended(address: Address) -> None:
    connection, sent = Connection(address, "test"), list[Future[None]]()

    async def last() -> None:
        try:
            await asyncio.sleep(60)
        finally:  # cancelled by the closing connection, after it has listed its tasks
            sent.append(connection.submit(asyncio.sleep(60)))

    sent.append(connection.submit(last()))
    connection.close()
    assert len(sent) == 2
    assert all(request.cancelled() for request in sent)


def test_calls_of_a_closed_connection_say_so(tmp_path: Path) -> None:
    server = Server(tmp_path / "broker")
    address = server.start().for_user(OPERATOR)
    connection = Connection(address, "test")
    connection.close()
    server.stop()
    with pytest.raises(BrokerError, match=rf"^the connection to broker {re.escape(address.url)} is closed$"):
        connection.call(connection.nc.flush(), 5)


def test_a_call_cut_off_by_closing_says_so(tmp_path: Path) -> None:
    server = Server(tmp_path / "broker")
    connection = Connection(server.start().for_user(OPERATOR), "test")
    began = Event()

    async def never_answered() -> None:
        began.set()
        await asyncio.sleep(60)

    with ThreadPoolExecutor() as pool:
        call = pool.submit(connection.call, never_answered(), 60)
        assert began.wait(30)
        connection.close()
        with pytest.raises(BrokerUnreachableError, match="closed"):
            call.result(30)
    server.stop()


def refusals(guarded: Guarded) -> int:
    return (guarded.keys / "server.log").read_text().count("authentication error")


@pytest.mark.slow
def test_revoked_process_pauses_between_sign_ins_and_takes_up_newer_credentials(
    make_guarded: MakeGuarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = make_guarded(["run.name=revoked"])
    guarded.make()
    guarded.start()
    old = copytree(guarded.keys / "rollout", tmp_path / "old")
    address = replace(guarded.address("rollout"), credentials=str(old / "nats.creds"))
    with closing(Connection(address, "rollout")) as connection:
        guarded.make(Settings(rotate=True))
        guarded.reload()
        wait_until(lambda: connection.refusal, "refusal")
        end = time.monotonic() + 2.0
        wait_until(lambda: time.monotonic() > end, "two seconds of refusals")
        assert refusals(guarded) < 8
        connection.check_sign_in()
        with monkeypatch.context() as patched, pytest.raises(BrokerError, match="and start this process again"):
            patched.setattr("broker.connection.SIGN_IN_SECONDS", 1.0)
            connection.check_sign_in()
        (old / "nats.creds").write_text((guarded.keys / "rollout" / "nats.creds").read_text())
        wait_until(lambda: connection.nc.is_connected, "sign-in with the newer credentials")
        assert connection.refusal == ""


def test_request_of_a_revoked_process_ends_with_the_remedy(
    make_guarded: MakeGuarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.connection.SIGN_IN_SECONDS", 1.0)
    guarded = make_guarded(["run.name=revoked"])
    guarded.make()
    guarded.start()
    old = copytree(guarded.keys / "rollout", tmp_path / "old")
    address = replace(guarded.address("rollout"), credentials=str(old / "nats.creds"))
    with closing(Connection(address, "rollout")) as connection:
        guarded.make(Settings(rotate=True))
        guarded.reload()
        wait_until(lambda: not connection.nc.is_connected, "loss of the connection")
        publish = partial(connection.js.publish, "relax.revoked.metric.rollout.0", b"{}")
        with pytest.raises(BrokerError) as ended:
            connection.call(connection.retry(publish, "publish"), 60)
    assert_says(ended.value, guarded.url, f"{old}/nats.creds", "revoked", "relax keys")


def test_flush_follows_the_subscription_before_it(address: Address) -> None:
    """nats-py writes the ping of a flush before the commands that wait to be written."""
    proxy = StoppingProxy(address, b"never sent", 0)

    async def ignore(message: Msg) -> None:
        """Do nothing with a message."""

    with closing(proxy), closing(Connection(proxy.address, "test")) as connection:

        async def subscribe() -> None:
            await connection.nc.subscribe("relax.t.probe", cb=ignore)
            await connection.nc.flush(30)

        connection.call(subscribe(), 60)
        sent = bytes(proxy.sent)
    assert sent.index(b"SUB relax.t.probe ") < sent.rindex(b"PING")
