"""Attacks on a server with real credentials: no user has the server do what the user itself may not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from nats.js.api import ConsumerInfo, StreamState
from nats.js.errors import NotFoundError

from broker.codec import encode
from broker.connection import Connection
from broker.permissions import OPERATOR
from broker.pull import PullSubscription
from broker.store import Store
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.config import Config, load_config
from relax_actors.messages import Weights
from relax_actors.roles.permissions import permissions, users
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.clusters import SERVERS, Cluster
from tests.support.embedded import Embedded
from tests.support.running import TINY, wait_until

Keyed = Embedded | Cluster

RUN = "guarded"
SETTINGS = [
    f"run.name={RUN}",
    "eval.data.kind=python",
    "eval.data.function=tiny_tasks.make",
    "environment.name=none.Game",
    "gateway.port=0",
]
CONFIG: Config = load_config(TINY, SETTINGS)
USERS = [user for user in users(CONFIG) if user != OPERATOR]
SUBJECTS = Subjects(RUN)
TABLE, LOG, BUCKET = SUBJECTS.table_stream, SUBJECTS.log_stream, f"KV_{SUBJECTS.state_bucket}"
FORGED = SUBJECTS.numbered("weights", 7)
HOSTILE = (
    *(f"$JS.API.STREAM.{request}.{stream}" for request in ("DELETE", "PURGE") for stream in (TABLE, LOG, BUCKET)),
    f"$JS.API.CONSUMER.DELETE.{TABLE}.rollout",
    FORGED,
    SUBJECTS.numbered("checkpoint", 7),
    SUBJECTS.cell(RowId(9, 9), "advantage"),
    f"$KV.{SUBJECTS.state_bucket}.run",
    f"$KV.{SUBJECTS.state_bucket}.lease.trainer.0",
    f"$JS.ACK.{TABLE}.rollout.1.1.1.0.0",
)
BODIES = (b"", b"+ACK", b"-NAK", b'{"batch": -1}', b'{"batch": 1, "no_wait": true}', b'{"last_by_subj": ">"}', b"{")
REMOVALS = ("$JS.API.STREAM.PURGE.", "$JS.API.STREAM.MSG.DELETE.")
"""Requests by which the roles that collect finished rows remove messages, which they may."""


@pytest.fixture(params=[1, pytest.param(SERVERS, marks=pytest.mark.slow)], ids=["embedded", "cluster"])
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Keyed]:
    """The server of `relax up`, or a cluster of three, with the streams and consumers of a run and a few cells."""
    found: Keyed
    if request.param == 1:
        config, found = CONFIG, Embedded(tmp_path / "broker", CONFIG)
    else:
        found = Cluster.at(tmp_path / "keys", SETTINGS)
        config = load_config(TINY, found.settings)
        found.make()
    found.start()
    with closing(Connection(found.address(OPERATOR), "root")) as connection:
        connection.call(ensure_run_streams(connection, config), 60)
        table = Table(connection, SUBJECTS, Store(tmp_path / "store"), "test.0#1")
        forged = encode(Weights(7, "x", [], 9), "trainer.0#9", subject=FORGED)
        rows = [(SUBJECTS.cell(RowId(0, n), name), forged) for n in range(4) for name in ("prompt", "trajectory")]
        table.put_encoded(rows)
    yield found
    found.stop()


def hostile_for(user: str) -> list[str]:
    """Hostile reply subjects, without those that the user may publish itself."""
    own = permissions(CONFIG, user)
    return [subject for subject in HOSTILE if not own.allows(subject, publish=True)]


def state_of(connection: Connection) -> dict[str, StreamState]:
    """Messages of each stream by subject, and pending rows of the rollout, as the operator sees them."""

    async def read() -> dict[str, StreamState]:
        return {
            name: (await connection.js.stream_info(name, subjects_filter=">")).state for name in (TABLE, LOG, BUCKET)
        }

    return connection.call(read(), 20)


def filled(pattern: str) -> str:
    """A subject that a pattern with wildcards matches."""
    parts = ["1" if part in ("*", ">") else part for part in pattern.split(".")]
    return ".".join(parts) + (".1.1.0.0" if pattern.startswith("$JS.ACK") else "")


def test_reply_subject_is_executed_within_the_account_of_the_streams(guarded: Keyed) -> None:
    """The attack is real: a user in the account of the streams has the server delete one by a reply subject."""
    with closing(Connection(guarded.address(OPERATOR), "operator")) as operator:

        async def attack() -> None:
            reply = f"$JS.API.STREAM.DELETE.{TABLE}"
            (message,) = await (await operator.js.pull_subscribe_bind("reward", TABLE)).fetch(1, timeout=10)
            await operator.nc.publish(message.reply, b"+ACK", reply=reply)
            await operator.nc.flush(5)

        operator.call(attack(), 20)

        def is_deleted() -> bool:
            try:
                state_of(operator)
            except NotFoundError:
                return True
            return False

        wait_until(is_deleted, "the end of the stream")


@pytest.mark.parametrize("user", [user for user in USERS if user != "observer"])
def test_request_is_answered_once(guarded: Keyed, user: str) -> None:
    """The server's own import of the API would answer as well, with "JetStream not enabled for account"."""
    heard: list[Msg] = []
    with closing(Connection(guarded.address(user), user)) as connection:

        async def ask() -> None:
            inbox = connection.nc.new_inbox()

            async def hear(message: Msg) -> None:
                heard.append(message)

            await connection.nc.subscribe(inbox, cb=hear)
            for _ in range(20):
                await connection.nc.publish(f"$JS.API.STREAM.INFO.{TABLE}", b"", reply=inbox)
            await connection.nc.flush(5)

        connection.call(ask(), 20)
        wait_until(lambda: len(heard) >= 20, "the answers")
        # Answers arrive in the order of the requests, so a second answer to an earlier one has arrived before this.
        assert connection.call(connection.js.stream_info(TABLE), 10).config.name == TABLE
    assert len(heard) == 20
    assert all("error" not in json.loads(message.data) for message in heard)


@pytest.mark.parametrize("user", USERS)
def test_hostile_reply_subjects_have_no_effect(guarded: Keyed, user: str) -> None:
    requests = [filled(subject) for subject in permissions(CONFIG, user).publish if subject.startswith("$JS")]
    requests = [subject for subject in requests if not subject.startswith(REMOVALS)]
    with closing(Connection(guarded.address(OPERATOR), "operator")) as operator:
        before = state_of(operator)
        with closing(Connection(guarded.address(user), user)) as attacker:

            async def attack() -> None:
                for subject in requests:
                    for reply in hostile_for(user):
                        for body in BODIES:
                            await attacker.nc.publish(subject, body, reply=reply)
                await attacker.nc.flush(10)
                # Requests that wait for messages are answered when they expire.
                await asyncio.sleep(0.2)

            attacker.call(attack(), 60)
        after = state_of(operator)
    assert {name: state.subjects for name, state in after.items()} == {n: s.subjects for n, s in before.items()}
    assert {name: state.last_seq for name, state in after.items()} == {n: s.last_seq for n, s in before.items()}


@pytest.mark.parametrize("user", [user for user in USERS if user != "observer"])
def test_hostile_reply_subject_of_a_permitted_write_has_no_effect(guarded: Keyed, user: str) -> None:
    written = [filled(subject) for subject in permissions(CONFIG, user).publish if subject.startswith(("relax", "$KV"))]
    assert written
    with closing(Connection(guarded.address(OPERATOR), "operator")) as operator:
        before = state_of(operator)
        with closing(Connection(guarded.address(user), user)) as attacker:

            async def attack() -> None:
                for subject in written:
                    for reply in hostile_for(user):
                        await attacker.nc.publish(subject, b"{}", reply=reply)
                await attacker.nc.flush(10)

            attacker.call(attack(), 60)
        after = state_of(operator)
    for name, state in after.items():
        assert set(state.subjects or {}) - set(before[name].subjects or {}) <= set(written)
        assert set(before[name].subjects or {}) <= set(state.subjects or {})


@pytest.mark.parametrize("user", USERS)
def test_user_is_told_what_is_written_and_cannot_forge_it(guarded: Keyed, user: str) -> None:
    """Versions and checkpoints reach every role as they are stored, and only those."""
    heard: list[Msg] = []
    with (
        closing(Connection(guarded.address(OPERATOR), "operator")) as operator,
        closing(Connection(guarded.address("trainer"), "trainer")) as trainer,
        closing(Connection(guarded.address(user), user)) as listener,
    ):

        async def listen(message: Msg) -> None:
            heard.append(message)

        async def subscribe() -> None:
            await listener.nc.subscribe(SUBJECTS.numbered("weights", "*"), cb=listen)
            await listener.nc.flush(5)

        if user == "node":
            return
        listener.call(subscribe(), 20)
        trainer.call(trainer.js.publish(FORGED, b"from the trainer"), 20)

        async def forge() -> None:
            for subject in (FORGED, f"view.{FORGED}", SUBJECTS.numbered("weights", 8)):
                if user != "trainer":
                    await listener.nc.publish(subject, b"forged")
            await listener.nc.flush(5)

        listener.call(forge(), 20)
        table = Table(operator, SUBJECTS, Store(guarded.keys / "store"), "reader")
        found = table.get(FORGED)
        assert found is not None
        assert found.data == b"from the trainer"
        assert table.get(SUBJECTS.numbered("weights", 8)) is None
        sequence = str(found.sequence)
        wait_until(lambda: sequence in [(m.headers or {}).get("Nats-Sequence") for m in heard], "view of the weights")


@pytest.mark.parametrize("role", ["rollout", "reward"])
def test_acknowledgement_of_a_delivery_has_no_effect_elsewhere(guarded: Keyed, role: str) -> None:
    with closing(Connection(guarded.address(OPERATOR), "operator")) as operator:
        before = state_of(operator)
        with closing(Connection(guarded.address(role), role)) as attacker:

            async def attack() -> None:
                pull = PullSubscription(attacker, TABLE, role, 4, backlog=(lambda: 0) if role == "rollout" else None)
                await pull.start()
                taken: list[Msg] = []
                while len(taken) < 4:
                    taken += await pull.fetch(4, 10)
                await pull.close()
                for message, reply in zip(taken, HOSTILE, strict=False):
                    await attacker.nc.publish(message.reply, b"+ACK", reply=reply)
                await attacker.nc.flush(10)

            attacker.call(attack(), 60)
        wait_until(lambda: consumer_of(operator, role).num_ack_pending == 0, "the acknowledgements")
        after = state_of(operator)
    assert {name: state.subjects for name, state in after.items()} == {n: s.subjects for n, s in before.items()}


def consumer_of(connection: Connection, role: str) -> ConsumerInfo:
    """State of a role's consumer, as the operator sees it."""

    async def read() -> ConsumerInfo:
        found: ConsumerInfo = await connection.js.consumer_info(TABLE, role)
        return found

    return connection.call(read(), 20)


def test_request_to_a_user_is_answered_by_it_alone(guarded: Keyed) -> None:
    """Rollouts reach the actors that host environments, and get several answers to a request; nobody else does."""
    subject, heard, intercepted = SUBJECTS.service("env", 0), [], []
    with (
        closing(Connection(guarded.address("environment"), "environment")) as environment,
        closing(Connection(guarded.address("rollout"), "rollout")) as rollout,
        closing(Connection(guarded.address("reward"), "reward")) as reward,
        closing(Connection(guarded.address("observer"), "observer")) as observer,
    ):

        async def serve() -> None:
            async def answer(message: Msg) -> None:
                for n in range(3):
                    await environment.nc.publish(message.reply, f"{message.data.decode()}{n}".encode())

            await environment.nc.subscribe(subject, cb=answer)
            await environment.nc.flush(5)

        async def overhear(connection: Connection) -> None:
            async def hear(message: Msg) -> None:
                intercepted.append(message.data)

            await connection.nc.subscribe(subject, cb=hear)
            with suppress(TimeoutError):
                await connection.nc.flush(1)

        async def ask(connection: Connection, body: bytes) -> None:
            inbox = connection.nc.new_inbox()

            async def hear(message: Msg) -> None:
                heard.append(message.data)

            await connection.nc.subscribe(inbox, cb=hear)
            await connection.nc.publish(subject, body, reply=inbox)
            await connection.nc.flush(5)

        environment.call(serve(), 20)
        for other in (reward, observer):
            other.call(overhear(other), 20)
        reward.call(ask(reward, b"foreign"), 20)
        rollout.call(ask(rollout, b"own"), 20)
        wait_until(lambda: len(heard) >= 3, "the answers")
    assert heard == [b"own0", b"own1", b"own2"]
    assert intercepted == []


def test_operator_reaches_an_actor_and_gets_all_of_its_answers(guarded: Keyed) -> None:
    subject, heard = SUBJECTS.service("profile_trainer", 0), []
    with (
        closing(Connection(guarded.address("trainer"), "trainer")) as trainer,
        closing(Connection(guarded.address(OPERATOR), "operator")) as operator,
    ):

        async def serve() -> None:
            async def answer(message: Msg) -> None:
                for n in range(2):
                    await trainer.nc.publish(message.reply, f"{message.data.decode()}{n}".encode())

            await trainer.nc.subscribe(subject, cb=answer)
            await trainer.nc.flush(5)

        async def ask() -> None:
            async def hear(message: Msg) -> None:
                heard.append(message.data)

            inbox = operator.nc.new_inbox()
            await operator.nc.subscribe(inbox, cb=hear)
            await operator.nc.publish(subject, b"own", reply=inbox)
            await operator.nc.flush(5)

        trainer.call(serve(), 20)
        operator.call(ask(), 20)
        wait_until(lambda: len(heard) >= 2, "the answers")
    assert heard == [b"own0", b"own1"]
