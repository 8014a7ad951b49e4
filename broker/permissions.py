"""Who may publish and hear what: a user's subjects, and the requests to JetStream behind the table's operations.

Where a request's answer goes is not checked by the server: whoever may make one can have the answer published on any
subject. So nobody whose writes are bounded may ask for a message as it is (`DIRECT.GET`), which would let him write
any bytes anywhere; what `STREAM.MSG.GET` answers is JSON, and no cell. One who must not write at all makes no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.subjects import Subjects, check_name

API = "$JS.API"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects that a user may publish on and subscribe to; nothing else, and nothing at all if there are none."""

    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()

    def __or__(self, other: Permissions) -> Permissions:
        return Permissions(
            tuple(dict.fromkeys(self.publish + other.publish)), tuple(dict.fromkeys(self.subscribe + other.subscribe))
        )

    def allows(self, subject: str, *, publish: bool) -> bool:
        """Whether a subject without wildcards is among them."""
        return any(matches(pattern, subject) for pattern in (self.publish if publish else self.subscribe))


def matches(pattern: str, subject: str) -> bool:
    """Whether a NATS pattern (`*` one token, `>` one or more at the end) takes a subject in."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for n, part in enumerate(wanted):
        if part == ">":
            return len(tokens) > n
        if n >= len(tokens) or part not in ("*", tokens[n]):
            return False
    return len(wanted) == len(tokens)


def inbox(run: str, user: str) -> str:
    """Prefix of the subjects that a user's answers come on, which nobody else of the run hears."""
    return f"_INBOX_{run}_{check_name(user, 'user')}"


def bucket_stream(subjects: Subjects) -> str:
    """The stream behind the run's KV bucket."""
    return f"KV_{subjects.state_bucket}"


def key(subjects: Subjects, name: str) -> str:
    """Subject of a key of the run's KV bucket."""
    return f"$KV.{subjects.state_bucket}.{name}"


def reading(*streams: str) -> Permissions:
    """Look at streams and at single messages of them."""
    return Permissions(
        tuple(f"{API}.{what}.{stream}" for stream in streams for what in ("STREAM.INFO", "STREAM.MSG.GET"))
    )


def following(*streams: str) -> Permissions:
    """Read streams in order, by consumers of one's own."""
    kinds = ("CREATE.{}", "INFO.{}.*", "DELETE.{}.*", "MSG.NEXT.{}.*")
    return Permissions(tuple(f"{API}.CONSUMER.{kind.format(stream)}" for stream in streams for kind in kinds))


def sharing(stream: str, consumer: str) -> Permissions:
    """Take part in one durable consumer."""
    requests = (f"{API}.CONSUMER.DURABLE.CREATE.{stream}.{consumer}", f"{API}.CONSUMER.MSG.NEXT.{stream}.{consumer}")
    return Permissions((*requests, f"$JS.ACK.{stream}.{consumer}.>"))


def removing(*streams: str) -> Permissions:
    """Remove messages."""
    kinds = ("STREAM.PURGE", "STREAM.MSG.DELETE")
    return Permissions(tuple(f"{API}.{kind}.{stream}" for stream in streams for kind in kinds))


def making(*streams: str) -> Permissions:
    """Make streams, and change them."""
    kinds = ("STREAM.CREATE", "STREAM.UPDATE")
    return Permissions(tuple(f"{API}.{kind}.{stream}" for stream in streams for kind in kinds))
