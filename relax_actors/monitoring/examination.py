"""Examination of a run: reads broker, table, leases and log, and says what is wrong."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from nats.aio.msg import Msg
from nats.js.api import ConsumerInfo, StreamInfo
from nats.js.errors import NotFoundError

from broker.address import Address, address_of
from broker.connection import Connection
from broker.leases import RunState
from broker.ordered_consumer import OrderedConsumer
from broker.permissions import OPERATOR
from broker.schema import SCHEMA
from broker.store import Store
from broker.streams import find_consumer, open_bucket
from broker.subjects import RowId, Subjects
from broker.table import CALL_DEADLINE, Table
from relax_actors.config import Config, validate
from relax_actors.config.saved import SavedSettings
from relax_actors.errors import ConfigError
from relax_actors.monitoring import health
from relax_actors.monitoring.connection import REACH_SECONDS, Connected, require_run, run_of_credentials
from relax_actors.monitoring.diagnosis import Observations, diagnose
from relax_actors.monitoring.diagnosis.log_reader import observe
from relax_actors.monitoring.finding import Finding
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.progress import Progress
from relax_actors.monitoring.quarantine import quarantined_rows
from relax_actors.monitoring.summary import read_ledger
from relax_actors.roles import role_names
from relax_actors.runtime import logs
from relax_actors.runtime.row import redelivery_column
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.streams import RunRecord, fetch_run_record
from relax_actors.training.ledger import Ledger

RECENT_SECONDS = 300.0
"""Age of the events that count."""
AGAIN_SECONDS = 1.0
"""Time after which rows that no actor fetches are looked at again."""
MAX_ACTORS = 200
"""Actors of a role whose newest metric is read."""
READ_EVENTS = 20_000
"""Messages at the end of the log that are read."""


def operator_of(run: str | None, url: str, credentials: Path | None, ca: Path | None) -> tuple[str, Address]:
    """Return name and broker address of a run elsewhere, for its operator; see `locate`.

    Raises:
        ConfigError: the name of the run is unknown.
        BrokerError: `url` is no address, or the credentials are not those of an operator.
    """
    address = address_of(url, credentials, ca).for_user(OPERATOR)
    return run_of_credentials(address, run), address


@contextmanager
def connected_by_address(run: str, address: Address) -> Iterator[Connected]:
    """Connect as the operator to a run without its folder; the broker has its settings.

    Raises:
        ConfigError: the broker has no such run.
        BrokerError: the broker does not answer, or refuses the credentials.
    """
    logs.configure(logging.WARNING)
    with closing(Connection(address, "doctor", REACH_SECONDS)) as connection:
        subjects = Subjects(run)
        connection.call(require_run(connection, subjects), 2 * REACH_SECONDS)
        state = RunState(connection, connection.call(open_bucket(connection, subjects, REACH_SECONDS), 30))
        record = connection.call(fetch_run_record(state), 30)
        if record is None:
            msg = f"run {run} has published no settings to {address.url}; start it with `relax up`"
            raise ConfigError(msg)
        broker = {**record.config.get("broker", {}), "url": address.url.partition(",")[0]}
        settings = {**record.config, "broker": broker}
        config = validate(settings, f"the settings of run {run}")
        table = Table(connection, subjects, Store(config.store_path), "doctor", direct=config.broker.replicas == 1)
        yield Connected(RunFolder(config.folder), SavedSettings(settings), table, state, live=True, load=lambda: config)


def examine(at: Connected) -> list[Finding]:
    """Return what is wrong with a run, the most important first; empty if nothing is."""
    config, table, call = at.config, at.table, at.table.connection.call
    record = call(fetch_run_record(at.state), 30)
    ledger = read_ledger(table, config)
    findings: list[Finding] = []
    if not (record is not None and record.finished):
        findings += _running(at, ledger, record)
        findings += health.lost(_lost_rows(at))
    findings += health.accounts(ledger)
    findings += health.quarantine(config.run.name, quarantined_rows(table), ledger)
    findings += health.characters(call(_newest_metrics(table, ("rollout", "gateway")), CALL_DEADLINE))
    findings += health.disks([at.folder.root, config.store_path])
    findings += _streams(at)
    findings += diagnose(observed_of(at))
    return sorted(findings, key=lambda finding: not finding.is_problem)


def observed_of(at: Connected) -> Observations:
    """Return what the rules read of a run."""
    return observe(at.table, at.config.model_dump(mode="json"))


def _running(at: Connected, ledger: Ledger, record: RunRecord | None) -> Iterator[Finding]:
    """Examine a run that is not finished."""
    config, call = at.config, at.table.connection.call
    if not at.live:
        yield Finding(_why_down(at, ledger))
        return
    leases = call(at.state.leases(), CALL_DEADLINE)
    log = _recent(at.table, config)
    yield from health.table(at.table.fill(), log.stall[1])
    yield from health.supervision(config, leases)
    yield from health.forged(call(at.state.forged_leases(), CALL_DEADLINE))
    yield from health.progress(config, ledger, leases, time.time())
    if record is not None:
        yield from _consumers(at, record, leases)
    for line in log.failures.lines()[: health.MAX_SHOWN]:
        yield Finding(f"in the last {RECENT_SECONDS / 60:.0f} minutes: {line}", is_problem=False)


def _why_down(at: Connected, ledger: Ledger) -> str:
    text = f"run {at.config.run.name} is not up, at step {ledger.version or 0} of {at.config.run.steps}"
    if at.folder.report.exists():
        body = json.loads(at.folder.report.read_text())
        text += f"; it ended since {body['child']} failed: {body['reason']}"
    return f"{text}. Start it again with the same `relax up`, which resumes it"


def _lost_rows(at: Connected) -> dict[str, list[RowId]]:
    """Return rows delivered again, by role; see `supervision/lost_rows.py`."""
    columns = {role: f"{at.table.subjects.prefix}.*.*.*.{redelivery_column(role)}" for role in role_names(at.config)}
    return {role: [cell.row for cell in at.table.list_cells(column)] for role, column in columns.items()}


def _recent(table: Table, config: Config) -> Progress:
    """Follow the newest events of the log as the progress line does."""
    progress, oldest = Progress(config.run.name, config.run.steps), time.time() - RECENT_SECONDS

    async def read() -> list[Msg]:
        last = (await table.connection.js.stream_info(table.subjects.log_stream)).state.last_seq
        filters = [table.subjects.event("*", "*", "*")]
        follower = OrderedConsumer(
            table.connection, table.subjects.log_stream, filters, start=max(1, last - READ_EVENTS)
        )
        return await follower.read_all()

    for message in table.connection.call(read(), CALL_DEADLINE):
        parsed = LogMessage.parse(message.subject, message.data)
        if parsed is not None and message.metadata.timestamp.timestamp() >= oldest:
            progress.take(parsed)
    return progress


async def _newest_metrics(table: Table, roles: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the numbers of the newest metric of each actor of some roles, by actor."""
    js, stream = table.connection.js, table.subjects.log_stream
    newest: dict[str, dict[str, float]] = {}
    for role in roles:
        info = await js.stream_info(stream, subjects_filter=table.subjects.metric(role, "*"))
        for subject in sorted(info.state.subjects or {})[:MAX_ACTORS]:
            with suppress(NotFoundError):
                message = await js.get_last_msg(stream, subject)
                if (parsed := LogMessage.parse(subject, message.data or b"")) is not None:
                    newest[parsed.sender] = parsed.numbers()
    return newest


def _consumers(at: Connected, record: RunRecord, leases: health.Leases) -> Iterator[Finding]:
    """Find missing consumers, and waiting rows that nobody fetches.

    The record of the run names the consumers of each role, and is published when they exist. This machine may lack the
    classes of the user's roles.
    """
    connection, stream = at.table.connection, at.table.subjects.table_stream

    def find(name: str) -> ConsumerInfo | None:
        return connection.call(find_consumer(connection, stream, name, 10), 20)

    names = [name for consumers in record.consumers.values() for name in consumers]
    infos = {name: info for name in names if (info := find(name)) is not None}
    yield from health.missing_consumers(stream, record.consumers, infos)
    present = {name.rpartition(".")[0] for name in leases}
    for role in present & infos.keys():
        if _is_unfetched(before := infos[role]):
            time.sleep(AGAIN_SECONDS)  # an actor may just have acknowledged its rows, to fetch the next ones
            again = find(role)
            if again is not None and _is_unfetched(again) and again.delivered == before.delivered:
                yield Finding(f"{again.num_pending} rows wait for {role}, and none of its actors fetches any")


def _is_unfetched(consumer: ConsumerInfo) -> bool:
    return bool(consumer.num_pending and not consumer.num_waiting and not consumer.num_ack_pending)


def _streams(at: Connected) -> Iterator[Finding]:
    """Find a table of another version, and servers of a cluster that are away."""
    connection, name = at.table.connection, at.table.subjects.table_stream

    async def ask() -> StreamInfo:
        info: StreamInfo = await connection.js.stream_info(name)
        return info

    info = connection.call(connection.retry(ask, f"look at {name}", 10), 20)
    expected = f"cell schema {SCHEMA}"
    if not str(info.config.description).endswith(expected):
        yield Finding(
            f"stream {name} is a {info.config.description or 'table of an earlier version'}; this version of relax has "
            f"{expected}. Use the version that began the run"
        )
    replicas = (info.cluster.replicas if info.cluster else None) or []
    for peer in replicas:
        if peer.offline or not peer.current:
            state = "is away" if peer.offline else f"is {peer.lag or 0} messages behind"
            yield Finding(
                f"server {peer.name} of the cluster {state}; the run needs most of {len(replicas) + 1} servers"
            )
