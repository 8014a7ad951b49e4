"""Permissions of every user of a run's broker, derived from the specs of the roles.

This is the only place that grants them. `docs/subjects.md` lists the result.
"""

from __future__ import annotations

from broker.permissions import (
    NODE,
    OBSERVER,
    OPERATOR,
    Permissions,
    allow_consumer_creation,
    allow_consumer_info,
    allow_follow_consumers,
    allow_history,
    allow_ordered_consumers,
    allow_pool_consumer,
    allow_read,
    allow_removal,
    allow_stream_changes,
    bucket_key,
    bucket_stream,
    inbox_prefix,
)
from broker.subjects import Subjects
from relax_actors.config import Config
from relax_actors.messages.operations import OPERATION
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.registry import role_class, role_names, spec_of
from relax_actors.runtime.row import ROW_KINDS
from relax_actors.runtime.service_role import ServiceRole


def users(config: Config) -> list[str]:
    """Names of all users: roles, node supervisors, the operator, and observers."""
    return [*role_names(config), NODE, OPERATOR, OBSERVER]


def permissions(config: Config, user: str) -> Permissions:
    """Subjects that a user may publish and subscribe to; raises ConfigError."""
    subjects = Subjects(config.run.name)
    answers = Permissions((), (f"{inbox_prefix(config.run.name, user)}.>",))
    if user == OPERATOR:
        return answers | _operator(subjects)
    if user == NODE:
        return answers | _node(subjects)
    if user == OBSERVER:
        heard = Permissions((), (f"{subjects.prefix}.>", bucket_key(subjects, "lease.>")))
        return answers | heard | allow_history(subjects.table_stream, subjects.log_stream)
    return answers | _role(config, subjects, user)


def _streams(subjects: Subjects) -> tuple[str, str, str]:
    return subjects.table_stream, subjects.log_stream, bucket_stream(subjects)


def _operator(subjects: Subjects) -> Permissions:
    """Everything of this run, and nothing of another run."""
    streams, table = _streams(subjects), subjects.table_stream
    own = (
        "$JS.API.INFO",
        f"{subjects.prefix}.>",
        bucket_key(subjects, ">"),
        f"$JS.ACK.{table}.>",
        f"$JS.API.STREAM.DELETE.{table}",
    )
    return (
        Permissions(own, (f"{subjects.prefix}.>", bucket_key(subjects, ">")))
        | allow_read(*streams)
        | allow_history(table, subjects.log_stream)
        | allow_ordered_consumers(*streams)
        | allow_consumer_creation(table)
        | allow_removal(*streams)
        | allow_stream_changes(*streams)
    )


def _node(subjects: Subjects) -> Permissions:
    """Permit events, failure counts and returned rows of dead actors; no cells."""
    table, log, bucket = _streams(subjects)
    leases = [f"lease.{kind}.*" for kind in ("node", "root", "owner")]
    keys = tuple(bucket_key(subjects, name) for name in [*_failures("*"), *leases])
    metrics = (subjects.metric("node", "*"), subjects.metric("root", "*"))
    # Of any name: roles may be added while the run is up, and inference servers are children of nodes, too.
    published = (subjects.event("*", "*", "*"), *metrics, *keys, f"$JS.ACK.{table}.>")
    withheld = tuple(subjects.event(name, "*", "*") for name in ("run", "chaos"))
    return Permissions(published, withheld=withheld) | allow_read(table, log, bucket)


def _failures(role: str) -> list[str]:
    """Patterns of keys that count failures of rows, with all tokens: no other key fits."""
    return [f"failure.{role}.{kind}.*.*" for kind in ROW_KINDS]


def _role(config: Config, subjects: Subjects, role: str) -> Permissions:
    table, _, bucket = _streams(subjects)
    spec = spec_of(config, role)
    keys = [f"incarnation.{role}.*", f"lease.{role}.*", *_failures(role), *spec.notes]
    published = [
        subjects.event(role, "*", "*"),
        subjects.metric(role, "*"),
        *(bucket_key(subjects, name) for name in keys),
        *(subjects.column(name, kind) for kind in ROW_KINDS if kind in spec.kinds for name in spec.writes),
        *(subjects.turns(kind) for kind in spec.kinds if spec.turns),
        *(subjects.numbered(kind, "*") for kind in spec.numbered),
        *([subjects.numbered(OPERATION, "*")] if spec.operates else []),
    ]
    subscribed = tuple(subjects.numbered(kind, "*") for kind in ("weights", "checkpoint"))
    rows = Permissions()
    if not issubclass(role_class(config, role), ServiceRole):
        rows = (allow_follow_consumers if spec.single else allow_pool_consumer)(table, role)
    for name in spec.observes:
        rows |= allow_consumer_info(table, name)
    removes = allow_removal(table, bucket) if spec.removes else Permissions()
    return (
        Permissions(tuple(published), subscribed)
        | _services(config, subjects, spec)
        | allow_read(table, bucket)
        | allow_history(table)
        | rows
        | removes
    )


def _services(config: Config, subjects: Subjects, spec: RoleSpec) -> Permissions:
    """Permit the requests that a role sends and answers."""
    answered = {kind for name in role_names(config) for kind in spec_of(config, name).serves} if spec.requests else ()
    sent = tuple(subjects.service(kind, "*") for kind in spec.requests if kind in answered)
    return Permissions(sent, (), tuple(subjects.service(kind, "*") for kind in spec.serves))
