"""Streams of a run, created by the first process that needs them, and the run's record for nodes that join."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nats.js.api import ConsumerConfig

from broker.connection import Connection
from broker.files import check_private_folder, make_private_folder
from broker.leases import RunState
from broker.permissions import follow_names
from broker.streams import (
    ensure_bucket,
    ensure_consumer,
    ensure_streams,
    find_consumer,
    follow_spec,
    log_spec,
    pool_spec,
    table_spec,
)
from broker.subjects import Subjects
from relax_actors.config import Config
from relax_actors.errors import BrokerError, ConfigError, UnsafePathError
from relax_actors.roles import make_role, role_names, spec_of, table_kinds
from relax_actors.runtime import Role, StatefulRole
from relax_actors.runtime.code_version import source_version
from relax_actors.runtime.join import trigger_columns
from relax_actors.runtime.row import redelivery_column
from relax_actors.runtime.service_role import ServiceRole

LOG_AGE = 7 * 86400.0
RUN_KEY, MARK = "run", "mark"
PRIVATE = ("url", "credentials", "ca")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as published to its nodes.

    Attributes:
        config: its settings, without those of the broker.
        import_path: folder in which its dotted paths are imported.
        finished: whether it is over.
        scaled: numbers of actors set by operations, by node name and role.
        expelled: names of actors that leave at once, by node name.
        mark: identifies the run's store; see `store_mark`.
        consumers: names of the durable consumers of each role; none for a role that handles no rows.
        code: version of the code that started it, see `runtime.code_version`.
        moved: names of the nodes to which operations have moved roles; empty for the node of `relax up`, or for none.
        copies: copies of the user's code that actors import on nodes that joined: version, and what had them start with
            it, by name of the actor, or by role; see `assignment.Code`.
    """

    config: dict[str, Any]
    import_path: str
    finished: bool = False
    scaled: dict[str, dict[str, int]] = field(default_factory=dict)
    mark: str = ""
    consumers: dict[str, list[str]] = field(default_factory=dict)
    code: str = ""
    expelled: dict[str, list[str]] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    copies: dict[str, list[str]] = field(default_factory=dict)


def consumers_of(config: Config, name: str, role: Role) -> list[ConsumerConfig]:
    """Return the durable consumers of a role."""
    if isinstance(role, ServiceRole):
        return []
    if isinstance(role, StatefulRole):
        return [follow_spec(consumer, role.follows(config)) for consumer in follow_names(name)]
    subjects, triggers = Subjects(config.run.name), trigger_columns(role.inputs(config), config.advantages.reads)
    filters = [subjects.column(column, kind) for column in triggers for kind in role.kinds]
    return [pool_spec(name, filters, config.supervision.ack_wait, overflows=role.spec.may_be_spot)]


def redelivery_filters(subjects: Subjects, name: str, role: Role) -> list[str]:
    """Return the subjects of cells that have a row delivered to a role of a pool again.

    They are added to its consumer with the first such cell, since each further filter costs the server time.
    """
    if isinstance(role, StatefulRole | ServiceRole):
        return []
    return [subjects.column(redelivery_column(name), kind) for kind in role.kinds]


async def _with_redeliveries(
    connection: Connection, stream: str, consumer: ConsumerConfig, filters: list[str]
) -> ConsumerConfig:
    """Keep the filters of redeliveries that a pool's consumer has already."""
    if not filters or (info := await find_consumer(connection, stream, str(consumer.durable_name), None)) is None:
        return consumer
    added = set(filters) & set(info.config.filter_subjects or [])
    return consumer.evolve(filter_subjects=[*(consumer.filter_subjects or []), *sorted(added)])


async def ensure_run_streams(connection: Connection, config: Config) -> RunState:
    """Create or update the run's table, log and bucket, and the consumers of its roles, whose classes are imported."""
    subjects, broker = Subjects(config.run.name), config.broker
    kinds = table_kinds(spec_of(config, name) for name in config.roles)
    specs = [
        table_spec(subjects, kinds, broker.max_bytes, broker.replicas),
        log_spec(subjects, broker.log_bytes, LOG_AGE, broker.replicas),
    ]
    await ensure_streams(connection, specs)
    for name in role_names(config):
        role = make_role(config, name)
        for consumer in consumers_of(config, name, role):
            filters = redelivery_filters(subjects, name, role)
            kept = await _with_redeliveries(connection, subjects.table_stream, consumer, filters)
            await ensure_consumer(connection, subjects.table_stream, kept)
    return RunState(connection, await ensure_bucket(connection, subjects, broker.replicas))


async def publish_run(
    state: RunState, config: Config, import_path: str, *, finished: bool = False, starts: bool = False
) -> None:
    """Publish the run, whose classes are imported; what operations have set is kept.

    At the start of `relax up` all roles are where its command and those of the nodes say, with the code on disk.
    """
    names = {
        name: [str(consumer.durable_name) for consumer in consumers_of(config, name, make_role(config, name))]
        for name in role_names(config)
    }
    body = config.model_dump(mode="json")
    body["broker"] = {name: value for name, value in body["broker"].items() if name not in PRIVATE}
    mark, code = store_mark(config.store_path), source_version()

    def publish(known: Any) -> dict[str, Any]:
        before = _published(known)
        # Roles that were removed keep their incarnation numbers, should they be added again.
        former = {} if before is None else {name: list[str]() for name in before.consumers}
        record = RunRecord(body, import_path, finished, mark=mark, consumers={**former, **names}, code=code)
        if before is not None:
            record = replace(record, scaled=before.scaled, expelled=before.expelled)
        if before is not None and not starts:
            record = replace(record, moved=before.moved, copies=before.copies)
        return asdict(record)

    await state.update(RUN_KEY, publish)


def store_mark(store: Path, *, make: bool = True) -> str:
    """Return the content of the mark file, which tells a run's store from another folder at the same path.

    Args:
        store: folder of the store.
        make: whether to create the file if it is missing; otherwise the result is then empty.

    Raises:
        ConfigError: another user could write to the store, see `broker.files`.
    """
    path = store / MARK
    with suppress(FileNotFoundError):
        try:
            (make_private_folder if make else check_private_folder)(store)
        except UnsafePathError as error:
            msg = f"the store cannot be used: {error}; or set store.path to a folder that does not exist"
            raise ConfigError(msg) from error
        if mark := path.read_text():
            return mark
    if not make:
        return ""
    mark = secrets.token_hex(8)
    unfinished = path.with_name(f".{MARK}.{mark}.tmp")
    unfinished.write_text(mark)
    try:
        os.link(unfinished, path)
    except FileExistsError:
        pass
    except OSError:  # no hard links on this file system
        with suppress(FileExistsError), path.open("x") as file:
            file.write(mark)
    finally:
        unfinished.unlink()
    return path.read_text()


async def publish_scale(
    state: RunState, node: str, numbers: dict[str, int], expelled: Sequence[str] | None = None
) -> None:
    """Publish how many actors of some roles a node should have, and which leave at once; None for the same as before.

    Raises:
        BrokerError: the run is not published.
    """

    def scale(record: RunRecord) -> RunRecord:
        scaled = {**record.scaled, node: {**record.scaled.get(node, {}), **numbers}}
        leaving = record.expelled if expelled is None else {**record.expelled, node: list(expelled)}
        return replace(record, scaled=scaled, expelled=leaving)

    await change_run_record(state, scale)


async def change_run_record(state: RunState, change: Callable[[RunRecord], RunRecord]) -> None:
    """Read, change and write the published run as one: its end may be published at the same time.

    Raises:
        BrokerError: the run is not published.
    """

    def changed(body: Any) -> dict[str, Any]:
        record = _published(body)
        if record is None:
            msg = "the run is not published to nodes; start it with `relax up` first"
            raise BrokerError(msg)
        return asdict(change(record))

    await state.update(RUN_KEY, changed)


async def fetch_run_record(state: RunState) -> RunRecord | None:
    """Fetch the published run; None if there is none or the entry is malformed."""
    return _published(await state.get(RUN_KEY))


def _published(body: Any) -> RunRecord | None:
    try:
        scaled = {name: {role: int(n) for role, n in numbers.items()} for name, numbers in body["scaled"].items()}
        consumers = {role: [str(name) for name in names] for role, names in body.get("consumers", {}).items()}
        expelled = {node: [str(name) for name in names] for node, names in body.get("expelled", {}).items()}
        moved = {str(role): str(node) for role, node in body.get("moved", {}).items()}
        copies = {str(name): [str(version), str(since)] for name, (version, since) in body.get("copies", {}).items()}
        return RunRecord(
            dict(body["config"]),
            str(body["import_path"]),
            bool(body["finished"]),
            scaled,
            str(body.get("mark", "")),
            consumers,
            str(body.get("code", "")),
            expelled,
            moved,
            copies,
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
