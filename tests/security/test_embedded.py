"""The server of `relax up` lets each user of a run reach exactly what a server of `relax keys` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from broker.address import Address
from broker.connection import Connection
from broker.credentials import OperatorKeys
from broker.errors import BrokerError
from broker.files import write_private
from broker.permissions import OPERATOR
from broker.server import Server
from broker.server_keys import Users
from relax_actors.roles.permissions import permissions
from relax_actors.supervision.streams import ensure_run_streams
from tests.security.test_allow_list import (
    CONFIG,
    EVERYTHING,
    USERS,
    last_subject,
    publish_all,
    reached_by,
)
from tests.support.embedded import Embedded
from tests.support.running import wait_until
from tests.support.tried_subjects import RUN, tried


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Embedded]:
    found = Embedded(tmp_path / "broker", CONFIG)
    found.start()
    yield found
    found.stop()


def keys_of(embedded: Embedded) -> OperatorKeys:
    return OperatorKeys.load(embedded.keys / "private" / "keys.json")


def test_exactly_the_documented_subjects_of_each_user_reach_the_streams(embedded: Embedded) -> None:
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    path = embedded.folder / "spy.creds"
    write_private(path, keys_of(embedded).credentials("spy", EVERYTHING, keys_of(embedded).account_of(RUN)))
    with closing(Connection(Address(embedded.address(OPERATOR).url, credentials=str(path)), "spy")) as spy:

        async def listen() -> None:
            await spy.nc.subscribe(">", cb=hear)
            await spy.nc.flush(5)

        spy.call(listen(), 20)
        for user in USERS:
            granted, mark = permissions(CONFIG, user), b"{" + user.encode()
            with closing(Connection(embedded.address(user), user)) as connection:
                publish_all(connection, tried(), mark)
                publish_all(connection, [last_subject(user)], mark + b"last")
                wait_until(lambda mark=mark: any(m.data == mark + b"last" for m in heard), "the last message")
            reached = {m.subject for m in heard if m.data == mark}
            assert reached == reached_by(granted, tried()), user


def test_users_of_a_run_with_the_longest_name_sign_in(tmp_path: Path) -> None:
    run = CONFIG.run.model_copy(update={"name": "x" * 64})
    longest = Embedded(tmp_path / "broker", CONFIG.model_copy(update={"run": run}))
    longest.start()
    try:
        for user in [*USERS, OPERATOR]:
            with closing(Connection(longest.address(user), user)) as connection:
                connection.call(connection.nc.flush(5), 10)
    finally:
        longest.stop()


def test_stranger_cannot_sign_in(embedded: Embedded) -> None:
    """Without credentials, and with those that another operator signed for an account of the same name."""
    path = embedded.folder / "stranger.creds"
    write_private(path, OperatorKeys.new().credentials("stranger", EVERYTHING, OperatorKeys.new().account_of(RUN)))
    url = embedded.address(OPERATOR).url
    for address in (Address(url), Address(url, credentials=str(path))):
        with pytest.raises(BrokerError, match="refuses these credentials"):
            Connection(address, "stranger", deadline=1.0)


def test_client_of_a_server_that_only_reads_a_run_may_stay_when_the_run_comes_up(tmp_path: Path) -> None:
    folder, users = tmp_path / "broker", Users.operator(RUN)
    reader = Server(folder, users=users)
    reader.start()
    try:
        address = Address.load(folder / "address.json").for_user(OPERATOR)
        connection = Connection(address, "reader")
    finally:
        reader.stop()
    with closing(connection):
        guarded = Embedded(folder, CONFIG)
        guarded.start()
        try:
            assert guarded.url == address.url
            connection.call(ensure_run_streams(connection, CONFIG), 60)
        finally:
            guarded.stop()
