"""Publish and subscribe permissions of a user, including JetStream requests.

The server does not check where the reply to a request goes: a user that may send a request can have the reply published
on any subject. `DIRECT.GET` replies with the raw message and would allow writing arbitrary bytes to any cell, so it is
not granted to users with restricted writes; `STREAM.MSG.GET` replies with JSON, which does not decode as a cell. A
user that must not write at all may send no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.subjects import Subjects, check_name

API = "$JS.API"
OPERATOR, NODE, OBSERVER = "operator", "node", "observer"
"""Users of a run besides its roles: its operator, the supervisors of its nodes, and read-only monitors."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects that a user may publish and subscribe to; all others are denied."""

    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()

    def __or__(self, other: Permissions) -> Permissions:
        return Permissions(
            tuple(dict.fromkeys(self.publish + other.publish)), tuple(dict.fromkeys(self.subscribe + other.subscribe))
        )

    def allows(self, subject: str, *, publish: bool) -> bool:
        """Whether publishing (or subscribing) to a subject without wildcards is permitted."""
        return any(matches(pattern, subject) for pattern in (self.publish if publish else self.subscribe))


def matches(pattern: str, subject: str) -> bool:
    """Whether a NATS pattern (`*` is one token, `>` one or more at the end) matches a subject."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for n, part in enumerate(wanted):
        if part == ">":
            return len(tokens) > n
        if n >= len(tokens) or part not in ("*", tokens[n]):
            return False
    return len(wanted) == len(tokens)


def inbox_prefix(run: str, user: str) -> str:
    """Prefix of a user's reply subjects; no other user of the run may subscribe to it."""
    return f"_INBOX_{run}_{check_name(user, 'user')}"


def bucket_stream(subjects: Subjects) -> str:
    """Name of the stream behind the run's KV bucket."""
    return f"KV_{subjects.state_bucket}"


def bucket_key(subjects: Subjects, name: str) -> str:
    """Subject of a key in the run's KV bucket."""
    return f"$KV.{subjects.state_bucket}.{name}"


def allow_read(*streams: str) -> Permissions:
    """Permit reading the state of streams and single messages."""
    return Permissions(
        tuple(f"{API}.{request}.{stream}" for stream in streams for request in ("STREAM.INFO", "STREAM.MSG.GET"))
    )


def allow_ordered_consumers(*streams: str) -> Permissions:
    """Permit reading streams in order with ephemeral consumers."""
    kinds = ("CREATE.{}", "INFO.{}.*", "DELETE.{}.*", "MSG.NEXT.{}.*")
    return Permissions(tuple(f"{API}.CONSUMER.{kind.format(stream)}" for stream in streams for kind in kinds))


def allow_durable_consumer(stream: str, consumer: str) -> Permissions:
    """Permit creating, pulling from and acknowledging one durable consumer."""
    requests = (f"{API}.CONSUMER.DURABLE.CREATE.{stream}.{consumer}", f"{API}.CONSUMER.MSG.NEXT.{stream}.{consumer}")
    return Permissions((*requests, f"$JS.ACK.{stream}.{consumer}.>"))


def allow_removal(*streams: str) -> Permissions:
    """Permit purging streams and deleting messages."""
    kinds = ("STREAM.PURGE", "STREAM.MSG.DELETE")
    return Permissions(tuple(f"{API}.{kind}.{stream}" for stream in streams for kind in kinds))


def allow_stream_changes(*streams: str) -> Permissions:
    """Permit creating and updating streams."""
    kinds = ("STREAM.CREATE", "STREAM.UPDATE")
    return Permissions(tuple(f"{API}.{kind}.{stream}" for stream in streams for kind in kinds))
