"""What passes from the account of each user to the account of the streams: exactly what is documented.

A spy in the account of the streams hears every message there. The users try every request of the JetStream API on the
streams of their run and of another one, every subject of both runs, and the server's own subjects.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from broker.address import Address
from broker.connection import Connection
from broker.credentials import OperatorKeys, SigningKey
from broker.errors import BrokerError
from broker.files import write_private
from broker.permissions import OPERATOR, Permissions
from relax_actors.config import Config, load_config
from relax_actors.roles.permissions import permissions, users
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.embedded import Embedded
from tests.support.guarded import Guarded
from tests.support.running import TINY, wait_until

RUN = "guarded"
SETTINGS = [f"run.name={RUN}", "eval.data.kind=python", "eval.data.function=tiny_tasks.make"]
CONFIG: Config = load_config(TINY, SETTINGS)
USERS = [user for user in users(CONFIG) if user != OPERATOR]
EVERYTHING = Permissions((">",), (">",))
STREAMS = [
    f"{before}RELAX_{run}_{after}"
    for run in (RUN, "other")
    for before, after in (("", "TABLE"), ("", "LOG"), ("KV_", "STATE"))
]
OF_SERVER = ("INFO", "STREAM.NAMES", "STREAM.LIST", "META.LEADER.STEPDOWN", "SERVER.REMOVE", "ACCOUNT.PURGE.x")
OF_STREAM = (
    "STREAM.CREATE.{}",
    "STREAM.UPDATE.{}",
    "STREAM.INFO.{}",
    "STREAM.DELETE.{}",
    "STREAM.PURGE.{}",
    "STREAM.MSG.GET.{}",
    "STREAM.MSG.DELETE.{}",
    "STREAM.SNAPSHOT.{}",
    "STREAM.RESTORE.{}",
    "STREAM.PEER.REMOVE.{}",
    "STREAM.LEADER.STEPDOWN.{}",
    "DIRECT.GET.{}",
    "CONSUMER.CREATE.{}",
    "CONSUMER.NAMES.{}",
    "CONSUMER.LIST.{}",
)
OF_CONSUMER = (
    "CONSUMER.CREATE.{}.{}",
    "CONSUMER.DURABLE.CREATE.{}.{}",
    "CONSUMER.INFO.{}.{}",
    "CONSUMER.DELETE.{}.{}",
    "CONSUMER.MSG.NEXT.{}.{}",
    "CONSUMER.RESET.{}.{}",
    "CONSUMER.PAUSE.{}.{}",
    "CONSUMER.UNPIN.{}.{}",
    "CONSUMER.LEADER.STEPDOWN.{}.{}",
)
CONSUMERS = ("rollout", "reward", "advantages", "prompts@1", "trainer@1", "evaluator@1", "strange")
COLUMNS = ("prompt", "trajectory", "reward", "advantage", "dropped", "quarantined", "requeued", "strange")
KEYS = (
    "run",
    "incarnation.rollout.0",
    "incarnation.trainer.0",
    "lease.rollout.0",
    "lease.trainer.0",
    "lease.node.1",
    "lease.owner.trainer",
    "failure.rollout.group.0.0",
    "note.weights_sender",
)


def tried() -> list[str]:
    """Subjects that every user tries."""
    api = [*OF_SERVER, *(request.format(stream) for request in OF_STREAM for stream in STREAMS)]
    api += [r.format(stream, name) for r in OF_CONSUMER for stream in STREAMS for name in CONSUMERS]
    found = [f"$JS.API.{request}" for request in api]
    for run in (RUN, "other"):
        found += [f"relax.{run}.{kind}.9.9.{column}" for kind in ("group", "eval") for column in COLUMNS]
        found += [f"relax.{run}.{kind}.9" for kind in ("batch", "weights", "checkpoint", "evaluation", "strange")]
        found += [f"relax.{run}.event.{role}.0.ready" for role in ("rollout", "trainer", "node", "root", "run")]
        found += [f"relax.{run}.metric.{role}.0" for role in ("rollout", "trainer", "node", "root", "run")]
        found += [f"$KV.RELAX_{run}_STATE.{key}" for key in KEYS]
        found += [f"$JS.ACK.RELAX_{run}_TABLE.{name}.1.1.1.0.0" for name in CONSUMERS]
        found += [
            f"view.relax.{run}.weights.9",
            f"_INBOX_{run}_trainer.x",
            f"$JS.API.DIRECT.GET.RELAX_{run}_LOG.relax.x",
        ]
        found += [f"$JS.API.DIRECT.GET.RELAX_{run}_TABLE.relax.{run}.weights.9"]
    return [*found, "$SYS.REQ.SERVER.PING", "$SYS.REQ.ACCOUNT.PING.CONNZ", "$JSC.R.x", "_R_.x.y", "_INBOX.x", "strange"]


Keyed = Guarded | Embedded
"""A server of `relax keys`, or that of `relax up`; both have the same accounts."""


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    """The server of `relax up` with the streams and consumers of a run."""
    found = Embedded(tmp_path_factory.mktemp("embedded") / "broker", CONFIG)
    found.start()
    with closing(Connection(found.address(OPERATOR), "root")) as connection:
        connection.call(ensure_run_streams(connection, CONFIG), 30)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server of `relax keys` with the streams and consumers of a run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found = Guarded(tmp_path_factory.mktemp("guarded") / "keys", probe.getsockname()[1], SETTINGS)
    found.make()
    found.start()
    with closing(Connection(found.address(OPERATOR), "root")) as connection:
        connection.call(ensure_run_streams(connection, CONFIG), 30)
    yield found
    found.stop()


def sign_in(guarded: Keyed, name: str, account: SigningKey, granted: Permissions) -> Connection:
    """Connect as a new user of an account, with permissions that `relax keys` would not give."""
    path = guarded.keys / f"{name}.creds"
    write_private(path, keys_of(guarded).credentials(name, granted, account=account))
    return Connection(Address(guarded.address(OPERATOR).url, credentials=str(path)), name, deadline=5.0)


def keys_of(guarded: Keyed) -> OperatorKeys:
    return OperatorKeys.load(Path(guarded.keys) / "private" / "keys.json")


@contextmanager
def spy(guarded: Keyed, account: SigningKey) -> Iterator[list[Msg]]:
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


def last_subject(user: str) -> str:
    """A subject that a user may publish; heard last, it shows that all others were heard or refused."""
    return next(
        filled(s) for s in permissions(CONFIG, user).publish if s.startswith(("relax.", "$JS.ACK", "$JS.API.D"))
    )


def filled(pattern: str) -> str:
    return ".".join("1" if part in ("*", ">") else part for part in pattern.split("."))


@pytest.mark.parametrize(
    ("server", "given"), [("embedded", "own permissions"), ("guarded", "every permission")], ids=["own", "every"]
)
@pytest.mark.parametrize("user", USERS)
def test_exactly_the_documented_subjects_reach_the_streams(
    request: pytest.FixtureRequest, user: str, server: str, given: str
) -> None:
    """Permissions and imports hold each alone: a user whose account has every permission gets no further."""
    guarded: Keyed = request.getfixturevalue(server)
    granted, mark = permissions(CONFIG, user), b"{" + secrets.token_hex(8).encode()
    keys, subjects = keys_of(guarded), tried()
    account = keys.account_of(user)
    with spy(guarded, keys.account) as heard, spy(guarded, keys.system) as heard_by_server:
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
        expected = {subject for subject in subjects if granted.allows(subject, publish=True)}
        if given == "every permission":
            expected.add("$JS.API.INFO")  # every account imports it, see broker.accounts
        # The server carries requests on to its own account under the same subjects, and answers every account that asks
        # for its own connections.
        own = {f"$SYS.REQ.ACCOUNT.{account.public}.CONNZ"} if given == "every permission" else set()
        assert {m.subject for m in heard_by_server if m.data == mark} <= expected | own
    assert reached - {f"view.{subject}" for subject in expected} == expected


@pytest.mark.parametrize("user", USERS)
def test_user_hears_exactly_what_is_documented(guarded: Guarded, user: str) -> None:
    """Even with every permission in its own account, a user hears what its account imports and nothing else."""
    granted, keys = permissions(CONFIG, user), keys_of(guarded)
    written = [s for s in tried() if s.startswith(("relax.", "$KV"))]
    with spy(guarded, keys.account_of(user)) as heard:
        with closing(sign_in(guarded, "writer", keys.account, EVERYTHING)) as writer:
            for stream in STREAMS[:3]:
                writer.call(writer.js.purge_stream(stream), 10)  # a cell is stored once
            publish_all(writer, written, b"written")
        stored = [s for s in written if f".{RUN}." in s or f"_{RUN}_" in s]
        expected = {s for s in stored if granted.allows(s, publish=False) and not s.endswith("strange.9")}
        wait_until(lambda: expected <= {m.subject for m in heard}, "what the user may hear")
    assert {m.subject for m in heard} == expected


def test_spy_hears_what_a_user_of_the_streams_account_sends(guarded: Guarded) -> None:
    """The tests above can fail: within the account of the streams nothing is held back."""
    keys, mark = keys_of(guarded), b"{control"
    with spy(guarded, keys.account) as heard:
        with closing(sign_in(guarded, "insider", keys.account, EVERYTHING)) as insider:
            publish_all(insider, ["$JS.API.STREAM.INFO.RELAX_other_TABLE", "relax.other.weights.9", "strange"], mark)
        wait_until(lambda: sum(m.data == mark for m in heard) == 3, "the messages")


def test_stranger_cannot_sign_in(guarded: Guarded) -> None:
    """Credentials that another operator signed, and an account of this operator that the server does not know."""
    for account in (OperatorKeys.new().account, keys_of(guarded).account_of("stranger")):
        path = guarded.keys / "stranger.creds"
        write_private(path, keys_of(guarded).credentials("stranger", EVERYTHING, account=account))
        with pytest.raises(BrokerError, match="refuses these credentials"):
            Connection(Address(guarded.address(OPERATOR).url, credentials=str(path)), "stranger", deadline=1.0)
