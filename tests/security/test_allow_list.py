"""What passes from the account of each user to the account of the streams: exactly what is documented.

A spy in the account of the streams hears every message there. The users try every request of the JetStream API on the
streams of their run and of a second run on the server, every subject of both runs, and the server's own subjects.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from broker.address import Address
from broker.connection import Connection
from broker.credentials import OperatorKeys, SigningKey
from broker.errors import BrokerError
from broker.files import write_private
from broker.permissions import OPERATOR, Permissions, matches
from relax_actors.config import Config, load_config
from relax_actors.roles.permissions import permissions, users
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.clusters import SERVERS, Cluster
from tests.support.guarded import Guarded, free_port
from tests.support.running import TINY, wait_until
from tests.support.tried_subjects import OTHER, RUN, STREAMS, tried

SETTINGS = [
    f"run.name={RUN}",
    "eval.data.kind=python",
    "eval.data.function=tiny_tasks.make",
    "environment.name=none.Game",
    "gateway.port=0",
]
CONFIG: Config = load_config(TINY, SETTINGS)
USERS = [user for user in users(CONFIG) if user != OPERATOR]
EVERYTHING = Permissions((">",), (">",))
SERVERS_OF = {subject: user for user in USERS for subject in permissions(CONFIG, user).serves}
"""The user that answers the requests of a subject."""


def on_servers(users: list[str]) -> pytest.MarkDecorator:
    """Run a test with each user on one server and on a cluster, with the last user there by default."""
    found = [pytest.param(1, user, id=user) for user in users]
    for user in users:
        marks = () if user == users[-1] else pytest.mark.slow
        found.append(pytest.param(SERVERS, user, id=f"{user} on a cluster", marks=marks))
    return pytest.mark.parametrize(("guarded", "user"), found, indirect=["guarded"])


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Guarded]]:
    """Start a server, or a cluster of three, with the streams and consumers of two runs; once for all tests."""
    started: dict[int, Guarded] = {}

    def once(servers: int) -> Guarded:
        if servers not in started:
            keys = tmp_path_factory.mktemp("guarded") / "keys"
            started[servers] = Cluster.at(keys, SETTINGS) if servers > 1 else Guarded(keys, free_port(), SETTINGS)
            prepare(started[servers])
        return started[servers]

    yield once
    for guarded in started.values():
        guarded.stop()


@pytest.fixture
def guarded(start: Callable[[int], Guarded], request: pytest.FixtureRequest) -> Guarded:
    return start(request.param)


def prepare(guarded: Guarded) -> None:
    guarded.make()
    guarded.start()
    other = [*guarded.settings, f"run.name={OTHER}"]
    guarded.admit(keys_of_other(guarded), other)
    for folder, settings in ((guarded.keys, guarded.settings), (keys_of_other(guarded), other)):
        address = guarded.address(OPERATOR, folder)
        wait_until(partial(signs_in, address), "credentials of the run")
        with closing(Connection(address, "root")) as connection:
            connection.call(ensure_run_streams(connection, load_config(TINY, settings)), 60)


def keys_of_other(guarded: Guarded) -> Path:
    return guarded.keys.with_name("other")


def signs_in(address: Address) -> bool:
    with suppress(BrokerError):
        Connection(address, "test", 2.0).close()
        return True
    return False


def sign_in(guarded: Guarded, name: str, account: SigningKey, granted: Permissions) -> Connection:
    """Connect as a new user of an account, with permissions that `relax keys` would not give."""
    path = guarded.keys / f"{name}.creds"
    write_private(path, keys_of(guarded).credentials(name, granted, account, issued=int(time.time()) + 9))
    return Connection(Address(guarded.url, credentials=str(path)), name, deadline=5.0)


def keys_of(guarded: Guarded) -> OperatorKeys:
    return OperatorKeys.load(Path(guarded.keys) / "private" / "keys.json")


@contextmanager
def spy(guarded: Guarded, account: SigningKey) -> Iterator[list[Msg]]:
    """Every message of an account."""
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    with closing(sign_in(guarded, f"spy-{account.public[:8]}", account, EVERYTHING)) as connection:

        async def listen() -> None:
            await connection.nc.subscribe(">", cb=hear)
            await connection.nc.flush(5)

        connection.call(listen(), 20)
        yield heard


def publish_all(connection: Connection, subjects: list[str], body: bytes, reply: str = "") -> None:
    async def publish() -> None:
        for subject in subjects:
            await connection.nc.publish(subject, body, reply=reply)
        await connection.nc.flush(10)

    connection.call(publish(), 60)


def is_service(subject: str) -> bool:
    """Whether users answer the requests of a subject, not the server."""
    return any(matches(pattern, subject) for pattern in SERVERS_OF)


def reached_by(granted: Permissions, subjects: Sequence[str]) -> set[str]:
    """The subjects that reach the run: no requests to other users, and no answers (`_R_.`) to requests of nobody."""
    return {s for s in subjects if granted.allows(s, publish=True) and not is_service(s) and s[:4] != "_R_."}


def last_subject(user: str) -> str:
    """A subject that a user may publish; heard last, it shows that all others were heard or refused."""
    return next(
        filled(s)
        for s in permissions(CONFIG, user).publish
        if s.startswith(("relax.", "$JS.ACK", "$JS.API.D")) and not is_service(filled(s))
    )


def filled(pattern: str) -> str:
    return ".".join("1" if part in ("*", ">") else part for part in pattern.split("."))


@pytest.mark.slow
@pytest.mark.parametrize("given", ["own permissions", "every permission"])
@on_servers(USERS)
def test_exactly_the_documented_subjects_reach_the_streams(guarded: Guarded, user: str, given: str) -> None:
    """Permissions and imports hold each alone: a user whose account has every permission gets no further.

    But for the events that are withheld from nodes: an account imports events of any name.
    """
    granted, mark = permissions(CONFIG, user), b"{" + secrets.token_hex(8).encode()
    keys, subjects = keys_of(guarded), tried()
    account = keys.account_of(RUN, user)
    with (
        spy(guarded, keys.account_of(RUN)) as heard,
        spy(guarded, keys.account_of(OTHER)) as heard_by_other,
        spy(guarded, keys.system) as heard_by_server,
    ):
        connection = (
            Connection(guarded.address(user), user)
            if given == "own permissions"
            else sign_in(guarded, "attacker", account, EVERYTHING)
        )
        with closing(connection):
            publish_all(connection, subjects, mark)
            if granted.publish:
                publish_all(connection, [last_subject(user)], mark + b"last")
                wait_until(lambda: any(m.data == mark + b"last" for m in heard), "the last message")
        reached = {m.subject for m in heard if m.data == mark}
        expected = reached_by(granted, subjects)
        if given == "every permission":
            expected = reached_by(replace(granted, withheld=()), subjects)  # held back by permissions alone
            expected.add("$JS.API.INFO")  # every account imports it, see broker.accounts
        # The server carries requests on to its own account under the same subjects, and answers every account that asks
        # for its own connections.
        own = {f"$SYS.REQ.ACCOUNT.{account.public}.CONNZ"} if given == "every permission" else set()
        assert {m.subject for m in heard_by_server if m.data == mark} <= expected | own
    assert reached - {f"view.{subject}" for subject in expected} == expected
    assert not any(mark in m.data for m in heard_by_other)


@on_servers(USERS)
def test_user_hears_exactly_what_is_documented(guarded: Guarded, user: str) -> None:
    """Even with every permission in its own account, a user hears what its account imports and nothing else."""
    granted, keys = permissions(CONFIG, user), keys_of(guarded)
    written = [s for s in tried() if s.startswith(("relax.", "$KV"))]
    with spy(guarded, keys.account_of(RUN, user)) as heard:
        for run, streams in ((OTHER, STREAMS[3:]), (RUN, STREAMS[:3])):
            with closing(sign_in(guarded, "writer", keys.account_of(run), EVERYTHING)) as writer:
                for stream in streams:
                    writer.call(writer.js.purge_stream(stream), 10)  # a cell is stored once
                publish_all(writer, written, b"written")
        stored = [s for s in written if f".{RUN}." in s or f"_{RUN}_" in s]
        expected = {s for s in stored if Permissions((), granted.subscribe).allows(s, publish=False)}
        expected = {s for s in expected if not s.endswith("strange.9") and not is_service(s)}
        expected |= {s for s in stored if Permissions((), granted.serves).allows(s, publish=False)}  # of the operator
        wait_until(lambda: expected <= {m.subject for m in heard}, "what the user may hear")
    assert {m.subject for m in heard} == expected


@on_servers(USERS)
def test_exactly_the_documented_requests_reach_the_users_that_answer_them(guarded: Guarded, user: str) -> None:
    """The account of a user that answers hears the requests that it answers, of the users that may send them."""
    granted, keys, mark = permissions(CONFIG, user), keys_of(guarded), b"{" + secrets.token_hex(8).encode()
    hostile = [f"$JS.API.STREAM.DELETE.{STREAMS[0]}", f"relax.{RUN}.request.generate.9", f"relax.{RUN}.weights.9"]
    for pattern, server in SERVERS_OF.items():
        if server == user:
            continue
        subject = filled(pattern)
        with (
            spy(guarded, keys.account_of(RUN, server)) as heard,
            spy(guarded, keys.account_of(RUN)) as heard_by_streams,
            closing(sign_in(guarded, "attacker", keys.account_of(RUN, user), EVERYTHING)) as attacker,
            closing(sign_in(guarded, "server", keys.account_of(RUN, server), EVERYTHING)) as answers,
        ):

            async def answer(message: Msg, answers: Connection = answers) -> None:
                await answers.nc.publish(message.reply, b"answer" + message.data)

            answers.call(answers.nc.subscribe(subject, cb=answer), 10)
            answers.call(answers.nc.flush(5), 10)
            for reply in hostile:
                publish_all(attacker, [*tried(), subject], mark, reply)
            if granted.publish:
                publish_all(attacker, [last_subject(user)], mark + b"last")
                wait_until(lambda: any(m.data == mark + b"last" for m in heard_by_streams), "the last message")
            may, served = granted.allows(subject, publish=True), permissions(CONFIG, server).serves
            if may:
                wait_until(lambda s=subject: sum(m.subject == s for m in heard) >= len(hostile), "the requests")
        own = {m.subject for m in heard if m.data == mark and is_service(m.subject)}
        sent = {s for s in (*tried(), subject) if granted.allows(s, publish=True)}
        assert own == {s for s in sent if any(matches(answered, s) for answered in served)}
        assert not any(m.data.startswith(b"answer") for m in heard_by_streams)


@pytest.mark.parametrize("guarded", [1], indirect=True)
def test_spy_hears_what_a_user_of_the_streams_account_sends(guarded: Guarded) -> None:
    """The tests above can fail: within the account of the streams nothing is held back."""
    keys, mark = keys_of(guarded), b"{control"
    with spy(guarded, keys.account_of(RUN)) as heard:
        with closing(sign_in(guarded, "insider", keys.account_of(RUN), EVERYTHING)) as insider:
            publish_all(insider, ["$JS.API.STREAM.INFO.RELAX_other_TABLE", "relax.other.weights.9", "strange"], mark)
        wait_until(lambda: sum(m.data == mark for m in heard) == 3, "the messages")


@on_servers([OPERATOR, "trainer"])
def test_a_run_is_out_of_reach_of_the_operator_of_another(guarded: Guarded, user: str) -> None:
    """Even with every permission in its own account; what both runs have by the same name stays each run's own."""
    keys, mark = keys_of(guarded), b"{" + secrets.token_hex(8).encode()
    own = keys.account_of(OTHER, "" if user == OPERATOR else user)
    with (
        spy(guarded, keys.account_of(RUN)) as heard,
        spy(guarded, keys.account_of(OTHER)) as heard_by_own,
        closing(sign_in(guarded, "attacker", own, EVERYTHING)) as attacker,
    ):
        publish_all(attacker, [*tried(), f"relax.{OTHER}.event.{user}.0.last"], mark)
        wait_until(lambda: any(m.subject.endswith(".last") for m in heard_by_own), "the last message")
    assert not any(mark in m.data for m in heard)


@pytest.mark.parametrize("guarded", [1, SERVERS], indirect=True)
def test_stranger_cannot_sign_in(guarded: Guarded) -> None:
    """Credentials that another operator signed, and an account of this operator that the server does not know."""
    for account in (OperatorKeys.new().account_of(RUN), keys_of(guarded).account_of(RUN, "stranger")):
        path = guarded.keys / "stranger.creds"
        write_private(path, keys_of(guarded).credentials("stranger", EVERYTHING, account))
        with pytest.raises(BrokerError, match="refuses these credentials"):
            Connection(Address(guarded.url, credentials=str(path)), "stranger", deadline=1.0)
