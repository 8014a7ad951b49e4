"""Each user's credentials on each subject of a run, at a real server that was configured by `relax keys`."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import nats.errors
import pytest

from broker.address import Address
from broker.connection import Connection
from broker.errors import BrokerError
from broker.leases import RunState
from broker.listeners import Settings
from broker.permissions import FOLLOWERS
from broker.server import MAX_PAYLOAD
from broker.store import Store
from broker.streams import ensure_bucket, ensure_consumer, ensure_streams, log_spec, pool_spec, table_spec
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.cli.keys import make_keys
from relax_actors.roles import table_kinds
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.running import TINY, wait_until

RUN = "guarded"
SUBJECTS = Subjects(RUN)
TABLE, LOG, BUCKET = SUBJECTS.table_stream, SUBJECTS.log_stream, f"KV_{SUBJECTS.state_bucket}"
KV = f"$KV.{SUBJECTS.state_bucket}"
SETTINGS = [
    f"run.name={RUN}",
    "eval.data.kind=python",
    "eval.data.function=tiny_tasks.make",
    "roles.reference.max_concurrent_rows=2",
    "roles.actor_fwd.max_concurrent_rows=2",
    "roles.shaped.actor=tiny_tasks.Shaped",
]
POOLS = ("rollout", "reward", "advantages", "reference", "actor_fwd", "shaped")
OWNERS = ("prompts", "trainer", "evaluator")
ROLES = (*POOLS, *OWNERS)
USERS = (*ROLES, "node", "operator", "observer")
CONSUMERS = {**{role: role for role in POOLS}, **{f"{role}@{n}": role for role in OWNERS for n in range(FOLLOWERS)}}
COLUMN_OF = {
    "prompt": "prompts",
    "trajectory": "rollout",
    "reward": "reward",
    "advantage": "advantages",
    "reference": "reference",
    "actor_fwd": "actor_fwd",
    "shaped_reward": "shaped",
}

# Who may publish on a subject, besides the operator.
WRITERS: dict[str, set[str]] = {
    **{f"relax.{RUN}.group.3.1.{column}": {role} for column, role in COLUMN_OF.items()},
    f"relax.{RUN}.group.3.1.dropped": {*POOLS, "prompts", "trainer"},
    f"relax.{RUN}.group.3.1.quarantined": {*POOLS, "prompts", "trainer"},
    f"relax.{RUN}.group.3.1.readmitted": {"prompts"},
    f"relax.{RUN}.group.3.1.requeued": set(),
    f"relax.{RUN}.group.3.1.nobodys": set(),
    f"relax.{RUN}.eval.3.1.prompt": {"evaluator"},
    f"relax.{RUN}.eval.3.1.trajectory": {"rollout"},
    f"relax.{RUN}.eval.3.1.reward": {"reward"},
    f"relax.{RUN}.eval.3.1.advantage": set(),
    f"relax.{RUN}.eval.3.1.quarantined": {"rollout", "reward", "evaluator"},
    f"relax.{RUN}.batch.7": {"trainer"},
    f"relax.{RUN}.weights.7": {"trainer"},
    f"relax.{RUN}.checkpoint.7": {"trainer"},
    f"relax.{RUN}.evaluation.7": {"evaluator"},
    f"relax.{RUN}.operation.7": set(),
    **{f"relax.{RUN}.event.{role}.0.ready": {role, "node"} for role in ROLES},
    f"relax.{RUN}.event.node.0.started": {"node"},
    f"relax.{RUN}.event.run.0.finished": set(),
    f"relax.{RUN}.event.chaos.0.fault": set(),
    **{f"relax.{RUN}.metric.{role}.0": {role} for role in ROLES},
    **{f"{KV}.incarnation.{role}.0": {role} for role in ROLES},
    **{f"{KV}.lease.{role}.0": {role} for role in ROLES},
    **{f"{KV}.failure.{role}.group.3.1": {role, "node"} for role in ROLES},
    f"{KV}.lease.node.4": {"node"},
    f"{KV}.lease.root.4": {"node"},
    f"{KV}.lease.owner.trainer": {"node"},
    f"{KV}.note.address": set(),
    f"{KV}.run": set(),
    **{f"$JS.ACK.{TABLE}.{role}.1.1.1.0.0": {role, "node"} for role in POOLS},
    **{f"$JS.API.CONSUMER.DURABLE.CREATE.{TABLE}.{name}": set() for name in CONSUMERS},
    **{f"$JS.API.CONSUMER.INFO.{TABLE}.{name}": {role} for name, role in CONSUMERS.items()},
    **{f"$JS.API.CONSUMER.MSG.NEXT.{TABLE}.{name}": {role} for name, role in CONSUMERS.items()},
    **{f"$JS.API.CONSUMER.RESET.{TABLE}.{role}@1": {role} for role in OWNERS},
    f"$JS.API.CONSUMER.CREATE.{TABLE}": set(),
    f"$JS.API.CONSUMER.DELETE.{TABLE}.rollout": set(),
    f"$JS.API.STREAM.INFO.{TABLE}": {*ROLES, "node"},
    f"$JS.API.STREAM.MSG.GET.{TABLE}": {*ROLES, "node"},
    f"$JS.API.DIRECT.GET.{TABLE}.relax.{RUN}.weights.7": {*ROLES, "node"},
    f"$JS.API.DIRECT.GET.{TABLE}": {*ROLES, "observer"},
    f"$JS.API.DIRECT.GET.{LOG}": {"observer"},
    f"$JS.API.STREAM.INFO.{LOG}": {"node"},
    f"$JS.API.STREAM.MSG.GET.{BUCKET}": {*ROLES, "node"},
    f"$JS.API.STREAM.PURGE.{TABLE}": {"trainer"},
    f"$JS.API.STREAM.MSG.DELETE.{TABLE}": {"trainer"},
    f"$JS.API.STREAM.PURGE.{BUCKET}": {"trainer"},
    f"$JS.API.STREAM.CREATE.{TABLE}": set(),
    f"$JS.API.STREAM.UPDATE.{TABLE}": set(),
    f"$JS.API.STREAM.DELETE.{TABLE}": set(),
    "$JS.API.INFO": set(),
}
# What not even the operator may: other runs, the server itself, and messages as they are (see broker.permissions).
NOBODYS = [
    "relax.other.weights.7",
    "relax.other.event.trainer.0.ready",
    "$KV.RELAX_other_STATE.lease.trainer.0",
    "$JS.API.STREAM.CREATE.RELAX_other_TABLE",
    f"$JS.API.DIRECT.GET.{BUCKET}",
    f"$JS.API.CONSUMER.RESET.{TABLE}.rollout",
    f"view.relax.{RUN}.weights.7",
    "$SYS.REQ.SERVER.PING",
    f"_INBOX_{RUN}_trainer.x",
]
LAST = "nobody.may"
HEARERS: dict[str, set[str]] = {
    f"relax.{RUN}.weights.*": {*ROLES, "operator", "observer"},
    f"relax.{RUN}.checkpoint.*": {*ROLES, "operator", "observer"},
    f"relax.{RUN}.>": {"operator", "observer"},
    f"relax.{RUN}.group.*.*.trajectory": {"operator", "observer"},
    f"relax.{RUN}.event.>": {"operator", "observer"},
    f"{KV}.lease.>": {"operator", "observer"},
    f"{KV}.failure.>": {"operator"},
    f"{KV}.note.>": {"operator"},
    "relax.other.>": set(),
    ">": set(),
    "$SYS.>": set(),
    "_INBOX.>": set(),
    **{f"_INBOX_{RUN}_{user}.>": {user} for user in USERS},
}


@pytest.fixture
def guarded(make_guarded: MakeGuarded) -> Guarded:
    """One that is up, with the run's streams."""
    found = make_guarded(SETTINGS)
    found.make()
    found.start()
    with closing(Connection(found.address("operator"), "root")) as connection:
        specs = [table_spec(SUBJECTS, table_kinds(), 1 << 26), log_spec(SUBJECTS, 1 << 24, 3600)]
        connection.call(ensure_streams(connection, specs), 20)
        connection.call(ensure_bucket(connection, SUBJECTS), 20)
    return found


class Refusals:
    """What a server refuses a user, as his client is told."""

    def __init__(self, address: Address) -> None:
        self.texts: list[str] = []
        self.connection = Connection(address, "tried")
        told = self.connection.nc._error_cb

        async def on_error(error: Exception) -> None:
            self.texts.append(str(error))
            await told(error)

        self.connection.nc._error_cb = on_error

    def of_publishing(self, subjects: list[str]) -> set[str]:
        async def work() -> None:
            for subject in subjects:
                await self.connection.nc.publish(subject, b"tried")
            await self.connection.nc.publish(LAST, b"")

        return self._found(work, "publish to", subjects)

    def of_subscribing(self, subjects: list[str]) -> set[str]:
        async def work() -> None:
            for subject in subjects:
                await self.connection.nc.subscribe(subject)
            await self.connection.nc.subscribe(LAST)

        return self._found(work, "subscription to", subjects)

    def _found(self, work: Callable[[], object], what: str, subjects: list[str]) -> set[str]:
        self.texts.clear()
        self.connection.call(work(), 20)  # type: ignore[arg-type]
        wait_until(lambda: any(LAST in text for text in self.texts), "refusal of what nobody may")
        # nats-py tells errors in small letters.
        refused = {text.split('"')[1] for text in self.texts if what in text} - {LAST}
        assert refused <= {subject.lower() for subject in subjects}
        return {subject for subject in subjects if subject.lower() in refused}


@pytest.mark.parametrize("user", USERS)
def test_a_user_may_do_exactly_what_is_listed(guarded: Guarded, user: str) -> None:
    tried = [*WRITERS, *NOBODYS]
    may = {subject for subject, writers in WRITERS.items() if user in writers or user == "operator"}
    if user == "operator":
        may -= {f"$JS.API.CONSUMER.RESET.{TABLE}.{role}@1" for role in OWNERS}
    refusals = Refusals(guarded.address(user))
    assert set(tried) - refusals.of_publishing(tried) == may
    hears = {subject for subject, hearers in HEARERS.items() if user in hearers}
    assert set(HEARERS) - refusals.of_subscribing(list(HEARERS)) == hears
    refusals.connection.close()


def test_who_may_write_a_key_cannot_clear_the_others(guarded: Guarded) -> None:
    """A message that rolls a stream up removes all that came before, of whatever subject."""
    with closing(Connection(guarded.address("operator"), "operator")) as operator:
        state = RunState(operator, operator.call(ensure_bucket(operator, SUBJECTS), 20))
        lives = [operator.call(state.next_incarnation("trainer", 0), 10) for _ in range(2)]
        with closing(Connection(guarded.address("rollout"), "rollout")) as rollout:
            for kind in ("all", "sub"):
                forged = rollout.js.publish(f"{KV}.lease.rollout.0", b"{}", headers={"Nats-Rollup": kind})
                with pytest.raises(nats.errors.Error):
                    rollout.call(forged, 10)
        assert operator.call(state.next_incarnation("trainer", 0), 10) == lives[-1] + 1


def test_monitoring_finds_what_waits_for_a_role_by_the_name_of_the_account(make_guarded: MakeGuarded) -> None:
    """As KEDA asks, with the account that deploy/kubernetes/autoscaling says where to find."""
    server = make_guarded(SETTINGS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        http = probe.getsockname()[1]
    server.make(Settings(http=http))
    server.start()
    with closing(Connection(server.address("operator"), "root")) as connection:
        connection.call(ensure_streams(connection, [table_spec(SUBJECTS, table_kinds(), 1 << 26)]), 20)
        prompts = pool_spec("rollout", [SUBJECTS.column("prompt")], 30.0)
        connection.call(ensure_consumer(connection, TABLE, prompts), 20)
    with closing(Connection(server.address("prompts"), "prompts")) as connection:
        connection.call(connection.js.publish(SUBJECTS.cell(RowId(0, 0), "prompt"), b"waits"), 20)
    preload = (server.keys / "server" / "auth.conf").read_text().partition("resolver_preload: {\n")[2]
    account = preload.partition(":")[0].strip()
    asked = f"http://127.0.0.1:{http}/jsz?acc={account}&consumers=true&config=true"
    with urllib.request.urlopen(asked, timeout=10) as answer:
        found = {known["name"]: known for known in json.load(answer)["account_details"]}
    (stream,) = found[account]["stream_detail"]
    (consumer,) = stream["consumer_detail"]
    assert (stream["name"], consumer["name"], consumer["num_pending"]) == (TABLE, "rollout", 1)


@pytest.mark.slow
def test_wrong_credentials_and_none_are_refused(guarded: Guarded, make_guarded: MakeGuarded) -> None:
    other = make_guarded(SETTINGS)
    other.make()
    strangers = [
        Address(guarded.address("rollout").url),
        Address(guarded.address("rollout").url, "relax", "guessed"),
        Address(guarded.address("rollout").url, credentials=other.address("operator").credentials),
    ]
    for stranger in strangers:
        with pytest.raises(BrokerError, match="refuses these credentials"):
            Connection(stranger, "stranger", 2)
    with pytest.raises(BrokerError, match="holds no credentials of nobody"):
        guarded.address("nobody")


@pytest.mark.slow
def test_credentials_expire(guarded: Guarded) -> None:
    soon = 3.0
    make_keys(str(TINY), guarded.keys, SETTINGS, Settings(days=soon / 86400, listen=f"127.0.0.1:{guarded.port}"))
    began = time.monotonic()
    with closing(Connection(guarded.address("rollout"), "living")) as living:
        assert living.nc.is_connected
        wait_until(lambda: not living.nc.is_connected, "end of a connection whose credentials expired")
        assert time.monotonic() - began >= soon - 1.5
    wait_until(lambda: time.monotonic() > began + soon + 1.5, "the end of the second in which they end", 10)
    with pytest.raises(BrokerError, match="refuses these credentials"):
        Connection(guarded.address("rollout"), "late", 2)


def test_rotated_keys_end_those_before(guarded: Guarded, tmp_path: Path) -> None:
    old = tmp_path / "old"
    (guarded.keys / "rollout").rename(old)
    guarded.make(Settings(rotate=True))
    assert guarded.process is not None
    before = Address(guarded.address("rollout").url, credentials=str(old / "nats.creds"))
    with closing(Connection(before, "old")) as connection:
        os.kill(guarded.process.pid, signal.SIGHUP)
        wait_until(lambda: not connection.nc.is_connected, "end of a connection with old credentials")
    with pytest.raises(BrokerError, match="refuses these credentials"):
        Connection(before, "old", 2)
    Connection(guarded.address("rollout"), "new").close()


def test_a_message_that_is_too_large_ends_its_connection_and_no_other(guarded: Guarded) -> None:
    with closing(Connection(guarded.address("trainer"), "trainer")) as trainer:
        with closing(Connection(guarded.address("rollout"), "rollout")) as rollout:
            subject = "relax.guarded.group.0.0.trajectory"
            with pytest.raises(nats.errors.MaxPayloadError):
                rollout.call(rollout.nc.publish(subject, bytes(MAX_PAYLOAD + 1)), 10)
            rollout.nc._max_payload = 1 << 30
            rollout.call(rollout.nc.publish(subject, bytes(MAX_PAYLOAD + 1)), 10)
            log = guarded.keys / "server.log"
            wait_until(lambda: "maximum payload" in log.read_text().lower(), "refusal in the server's log")
        table = Table(trainer, SUBJECTS, Store(guarded.keys / "store"), "trainer.0#1")
        assert table.get(subject) is None


def test_keys_are_for_their_user_only(guarded: Guarded) -> None:
    for path in guarded.keys.rglob("*"):
        if path.name in ("nats.creds", "keys.json", "ca-key.pem", "key.pem"):
            assert path.stat().st_mode & 0o077 == 0, path
    config = (guarded.keys / "server" / "auth.conf").read_text()
    private = (guarded.keys / "private" / "keys.json").read_text()
    assert not any(seed in config for seed in private.split('"') if seed.startswith("S"))
