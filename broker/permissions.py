"""Publish and subscribe permissions of a user, including JetStream requests.

The server does not check where the answer to a request goes; `broker.accounts` keeps the answers out of the account of
the streams. Nobody but the operator may create a consumer, which can deliver messages to any subject of that account.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.subjects import Subjects, check_name

API = "$JS.API"
FOLLOWERS = 2
"""Consumers of a role that follows its columns. Successive incarnations use different ones: an incarnation that was
stopped by a signal and replaced neither takes messages of its successor nor resets the successor's consumer."""
OPERATOR, NODE, OBSERVER = "operator", "node", "observer"
"""Users of a run besides its roles: its operator, the supervisors of its nodes, and read-only monitors."""
ANSWERS = "_R_.>"
"""Reply subjects, chosen by the server, of requests from other accounts."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects that a user may publish and subscribe to; all others are denied."""

    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    serves: tuple[str, ...] = ()
    """Subjects of requests that the user answers. Users that may publish them reach its account, and no other one."""
    withheld: tuple[str, ...] = ()
    """Subjects that the user may not publish although `publish` contains them."""

    def __or__(self, other: Permissions) -> Permissions:
        return Permissions(
            tuple(dict.fromkeys(self.publish + other.publish)),
            tuple(dict.fromkeys(self.subscribe + other.subscribe)),
            tuple(dict.fromkeys(self.serves + other.serves)),
            tuple(dict.fromkeys(self.withheld + other.withheld)),
        )

    def allows(self, subject: str, *, publish: bool) -> bool:
        """Whether publishing (or subscribing) to a subject without wildcards is permitted."""
        if publish and any(matches(pattern, subject) for pattern in self.withheld):
            return False
        return any(matches(pattern, subject) for pattern in (self.published if publish else self.subscribed))

    @property
    def published(self) -> tuple[str, ...]:
        """All subjects that the user may publish, answers to requests included."""
        return (*self.publish, ANSWERS) if self.serves else self.publish

    @property
    def subscribed(self) -> tuple[str, ...]:
        """All subjects that the user may subscribe to, those of requests included."""
        return self.subscribe + self.serves


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
    kinds = ("STREAM.INFO.{}", "STREAM.MSG.GET.{}", "DIRECT.GET.{}.>")
    return Permissions(tuple(f"{API}.{kind.format(stream)}" for stream in streams for kind in kinds))


def allow_history(*streams: str) -> Permissions:
    """Permit reading stored messages by pages, which the server bounds (`broker.history`)."""
    return Permissions(tuple(f"{API}.DIRECT.GET.{stream}" for stream in streams))


def allow_ordered_consumers(*streams: str) -> Permissions:
    """Permit creating consumers for reading in order; only for the streams' account."""
    kinds = ("CREATE.{}", "INFO.{}.*", "DELETE.{}.*", "MSG.NEXT.{}.*")
    return Permissions(tuple(f"{API}.CONSUMER.{kind.format(stream)}" for stream in streams for kind in kinds))


def allow_pool_consumer(stream: str, consumer: str) -> Permissions:
    """Permit pulling from and acknowledging one durable consumer."""
    return _consumer(stream, consumer, "INFO", "MSG.NEXT") | Permissions((f"$JS.ACK.{stream}.{consumer}.>",))


def allow_consumer_info(stream: str, consumer: str) -> Permissions:
    """Permit looking at the state of one durable consumer."""
    return _consumer(stream, consumer, "INFO")


def allow_follow_consumers(stream: str, role: str) -> Permissions:
    """Permit resetting and pulling from the consumers of a role that follows its columns."""
    granted = Permissions()
    for name in follow_names(role):
        granted |= _consumer(stream, name, "INFO", "MSG.NEXT", "RESET")
    return granted


def follow_names(role: str) -> list[str]:
    """Names of the durable consumers of a role that follows its columns."""
    return [follow_name(role, incarnation) for incarnation in range(FOLLOWERS)]


def follow_name(role: str, incarnation: int) -> str:
    """Name of the durable consumer of one incarnation. No role's name contains `@`."""
    return f"{role}@{incarnation % FOLLOWERS}"


def _consumer(stream: str, consumer: str, *requests: str) -> Permissions:
    return Permissions(tuple(f"{API}.CONSUMER.{request}.{stream}.{consumer}" for request in requests))


def allow_consumer_creation(stream: str) -> Permissions:
    """Permit creating any durable consumer of a stream; only for the streams' account."""
    return Permissions((f"{API}.CONSUMER.DURABLE.CREATE.{stream}.*", f"{API}.CONSUMER.INFO.{stream}.*"))


def allow_removal(*streams: str) -> Permissions:
    """Permit purging streams and deleting messages."""
    kinds = ("STREAM.PURGE", "STREAM.MSG.DELETE")
    return Permissions(tuple(f"{API}.{kind}.{stream}" for stream in streams for kind in kinds))


def allow_stream_changes(*streams: str) -> Permissions:
    """Permit creating and updating streams."""
    kinds = ("STREAM.CREATE", "STREAM.UPDATE")
    return Permissions(tuple(f"{API}.{kind}.{stream}" for stream in streams for kind in kinds))
