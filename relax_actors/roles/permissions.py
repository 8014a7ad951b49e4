"""What each user of a run's broker may do, from the columns that roles write: the one place that says so."""

from __future__ import annotations

from broker.permissions import (
    Permissions,
    allow_durable_consumer,
    allow_ordered_consumers,
    allow_read,
    allow_removal,
    allow_stream_changes,
    bucket_key,
    bucket_stream,
    inbox_prefix,
)
from broker.subjects import ROW_KINDS, Subjects
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.roles import role_class, role_names
from relax_actors.runtime import StatefulRole

OPERATOR, NODE, OBSERVER = "operator", "node", "observer"
ENDINGS = ("dropped", "quarantined")
# What the roles that own state write, of rows and numbered.
OWNED = {
    "prompts": (("group",), ("prompt", *ENDINGS, "readmitted"), ()),
    "trainer": (("group",), ENDINGS, ("batch", "weights", "checkpoint")),
    "evaluator": (("eval",), ("prompt", "quarantined"), ("evaluation",)),
}
REMOVERS = ("trainer", "evaluator")
# Where a role tells others how to reach it; who hears the bucket need not be among them.
NOTES = {"trainer": ("note.weights_sender",)}


def users(config: Config) -> list[str]:
    """Everybody who has credentials: the roles, the supervisor of a machine, the operator and who only looks on.

    Raises:
        ConfigError: a role of the user's has the name of one of those.
    """
    roles = role_names(config)
    if taken := sorted({OPERATOR, NODE, OBSERVER} & set(roles)):
        msg = f"roles.{taken[0]}: {taken[0]!r} is the name of a user of the broker; choose another name"
        raise ConfigError(msg)
    return [*roles, NODE, OPERATOR, OBSERVER]


def permissions(config: Config, user: str) -> Permissions:
    """What a user may publish on and hear."""
    subjects = Subjects(config.run.name)
    hears = Permissions((), (f"{inbox_prefix(config.run.name, user)}.>",))
    if user == OPERATOR:
        return hears | _operator(subjects)
    if user == NODE:
        return hears | _node(subjects)
    if user == OBSERVER:
        leases = bucket_key(subjects, "lease.>")
        return Permissions((), (*hears.subscribe, f"{subjects.prefix}.>", leases))
    return hears | _role(config, subjects, user)


def _streams(subjects: Subjects) -> tuple[str, str, str]:
    return subjects.table_stream, subjects.log_stream, bucket_stream(subjects)


def _operator(subjects: Subjects) -> Permissions:
    """Everything of the run, and nothing beside it."""
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
        | allow_ordered_consumers(*streams)
        | allow_removal(*streams)
        | allow_stream_changes(*streams)
    )


def _node(subjects: Subjects) -> Permissions:
    """Tell of actors, count their deaths, give back what dead ones had taken; write no cell."""
    table, log, bucket = _streams(subjects)
    keys = tuple(bucket_key(subjects, f"{kind}.>") for kind in ("failure", "lease.node", "lease.root", "lease.owner"))
    published = (subjects.event("*", "*", "*"), *keys, f"$JS.ACK.{table}.>")
    return Permissions(published) | allow_read(table, log, bucket)


def _role(config: Config, subjects: Subjects, role: str) -> Permissions:
    table, _, bucket = _streams(subjects)
    keys = [f"incarnation.{role}.*", f"lease.{role}.*", f"failure.{role}.>", *NOTES.get(role, ())]
    published = [
        subjects.event(role, "*", "*"),
        subjects.metric(role, "*"),
        *(bucket_key(subjects, name) for name in keys),
    ]
    kinds: tuple[str, ...]
    columns: tuple[str, ...]
    if role in OWNED:
        kinds, columns, numbered = OWNED[role]
        wakes = allow_ordered_consumers(table)
    elif issubclass(cls := role_class(config, role), StatefulRole):
        msg = f"roles.{role}: {cls.__name__} owns state; what it may write is not known, so it gets no credentials"
        raise ConfigError(msg)
    else:
        kinds, columns, numbered = cls.kinds, (*([cls.writes] if cls.writes else []), *ENDINGS), ()
        wakes = allow_durable_consumer(table, role)
    published += [subjects.column(name, kind) for kind in ROW_KINDS if kind in kinds for name in columns]
    published += [subjects.numbered(kind, "*") for kind in numbered]
    heard = tuple(subjects.numbered(kind, "*") for kind in ("weights", "checkpoint"))
    removes = allow_removal(table, bucket) if role in REMOVERS else Permissions()
    return Permissions(tuple(published), heard) | allow_read(table, bucket) | wakes | removes
