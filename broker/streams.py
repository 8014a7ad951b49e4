"""Configuration and creation of a run's streams, consumers and KV bucket."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    ConsumerInfo,
    DeliverPolicy,
    DiscardPolicy,
    RePublish,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    StreamInfo,
)
from nats.js.errors import APIError, BadRequestError, BucketNotFoundError, NotFoundError
from nats.js.kv import KeyValue

from broker.accounts import view_of
from broker.codec import MAX_CELL_BYTES
from broker.connection import Connection
from broker.errors import BrokerError
from broker.lease_entries import MAX_LEASE_BYTES
from broker.schema import SCHEMA
from broker.subjects import Kinds, Subjects

_DUPLICATE_WINDOW = 120.0
MAX_LOG_BYTES = 256 << 10
_HEADER_BYTES = 4 << 10
MAX_ACTORS = 8192
"""Maximum number of actors of a role with a pending pull request; the server's default limit is 512."""
_NAME_IN_USE = 10058
STATE_BYTES = 64 << 20
"""Size limit of the bucket, in bytes; that of a run with a thousand actors has less than 1 MiB."""
CONSUMER_SECONDS = 60.0
"""Default seconds to wait for a consumer that the owner of the run creates."""
OVERFLOW = "overflow"
"""Priority group, and policy, of consumers that hold messages back from some of their readers while few wait."""


@dataclass
class PoolConsumer(ConsumerConfig):
    """Consumer shared by a pool, with fields of nats-server 2.11 that nats-py lacks."""

    priority_groups: list[str] | None = None
    priority_policy: str | None = None


def table_spec(subjects: Subjects, kinds: Kinds, max_bytes: int, replicas: int = 1) -> StreamConfig:
    """Table stream: one message per subject, and the server refuses a second one.

    The stream republishes what it has stored, for users with accounts of their own (`broker.accounts`).
    """
    return StreamConfig(
        name=subjects.table_stream,
        description=f"relax-actors table, cell schema {SCHEMA}",
        subjects=subjects.table_subjects(kinds),
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        max_bytes=max_bytes,
        max_msg_size=MAX_CELL_BYTES + _HEADER_BYTES,
        num_replicas=replicas,
        allow_direct=True,
        republish=_views(f"{subjects.prefix}.>"),
    )


def log_spec(subjects: Subjects, max_bytes: int, max_age: float, replicas: int = 1) -> StreamConfig:
    """Log stream of events and metrics, of `max_bytes` and `max_age` (seconds); republished."""
    return StreamConfig(
        name=subjects.log_stream,
        subjects=subjects.log_subjects(),
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_bytes=max_bytes,
        max_msg_size=MAX_LOG_BYTES + _HEADER_BYTES,
        max_age=max_age,
        num_replicas=replicas,
        allow_direct=True,
        republish=_views(f"{subjects.prefix}.>"),
    )


def follow_spec(name: str, filters: list[str]) -> ConsumerConfig:
    """Durable consumer of a role with state: its columns in stream order, unacknowledged.

    An incarnation resets it to the sequence that it starts from (see `OrderedConsumer`).
    """
    return ConsumerConfig(
        durable_name=name,
        filter_subjects=filters,
        ack_policy=AckPolicy.NONE,
        deliver_policy=DeliverPolicy.ALL,
        max_deliver=1,
    )


def pool_spec(
    name: str, filters: list[str], ack_wait: float, max_ack_pending: int = -1, *, overflows: bool = False
) -> PoolConsumer:
    """Durable consumer that all actors of a role share.

    Deliveries are unlimited: the actor decides how often a row may fail, because it can tell a delivery that killed an
    actor from one that was only buffered.

    Args:
        name: name of the consumer, the role's name.
        filters: subjects to deliver.
        ack_wait: seconds after which an unacknowledged message is redelivered.
        max_ack_pending: maximum number of unacknowledged messages; unlimited by default, as each actor bounds its own.
        overflows: whether pull requests name the group `OVERFLOW`, and may ask for messages only above a backlog. The
            server updates an existing consumer to it.
    """
    return PoolConsumer(
        durable_name=name,
        filter_subjects=filters,
        ack_policy=AckPolicy.EXPLICIT,
        deliver_policy=DeliverPolicy.ALL,
        ack_wait=ack_wait,
        max_deliver=-1,
        max_ack_pending=max_ack_pending,
        max_waiting=MAX_ACTORS,
        priority_groups=[OVERFLOW] if overflows else None,
        priority_policy=OVERFLOW if overflows else None,
    )


def _views(subject: str) -> RePublish:
    return RePublish(src=subject, dest=view_of(subject))


async def ensure_streams(connection: Connection, specs: list[StreamConfig], deadline: float = 20.0) -> None:
    """Create streams, or update existing ones. Several processes may call this at once.

    Raises:
        BrokerError: the server refuses a stream, e.g. for lack of storage, or a table holds cells of another schema.
        BrokerUnreachableError: no answer within `deadline` seconds.
    """
    for spec in specs:

        async def ensure(spec: StreamConfig = spec) -> None:
            try:
                info = await connection.js.stream_info(str(spec.name))
            except NotFoundError:
                try:
                    await connection.js.add_stream(spec)
                except BadRequestError as error:
                    if error.err_code != _NAME_IN_USE:
                        raise
            else:
                _check_schema(spec, info)
                await connection.js.update_stream(spec)

        try:
            await connection.retry(ensure, f"create stream {spec.name}", deadline)
        except APIError as error:
            url = connection.address.url
            msg = f"broker {url} refuses stream {spec.name}: {error.description}; free space, "
            msg += "lower broker.max_bytes, or run `relax keys` again if it was raised after that"
            raise BrokerError(msg) from error


def _check_schema(spec: StreamConfig, info: StreamInfo) -> None:
    """Raise BrokerError if a table holds cells that another version of relax-actors wrote."""
    if spec.description and info.config.description != spec.description and info.state.messages:
        description = info.config.description or "relax-actors table, cell schema 1"
        msg = (
            f"stream {spec.name} is a {description}; this version reads cell schema {SCHEMA}. Finish that run with the "
            "version that began it, or start a run of another name"
        )
        raise BrokerError(msg)


async def wait_for_stream(connection: Connection, name: str, deadline: float) -> None:
    """Wait for a stream of another process; raises BrokerError after `deadline` seconds."""
    end = time.monotonic() + deadline

    async def exists() -> bool:
        try:
            await connection.js.stream_info(name)
        except NotFoundError:
            return False
        return True

    while not await connection.retry(exists, f"wait for stream {name}", deadline):
        if time.monotonic() > end:
            msg = f"stream {name} was not created within {deadline:g} s; is the run up?"
            raise BrokerError(msg)
        await asyncio.sleep(0.1)


async def ensure_bucket(connection: Connection, subjects: Subjects, replicas: int = 1) -> KeyValue:
    """Open the run's KV bucket for leases, incarnations and failure counts; create it if absent.

    Each lease has its own TTL. nats-py would create the bucket with roll-ups allowed, and a user that may write one key
    could then purge all of them. Leases are republished, as the table is.
    """
    config = StreamConfig(
        name=f"KV_{subjects.state_bucket}",
        subjects=[f"$KV.{subjects.state_bucket}.>"],
        storage=StorageType.FILE,
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        max_bytes=STATE_BYTES,
        max_msg_size=MAX_LEASE_BYTES + _HEADER_BYTES,
        duplicate_window=_DUPLICATE_WINDOW,
        num_replicas=replicas,
        allow_msg_ttl=True,
        allow_rollup_hdrs=False,
        deny_delete=True,
        republish=_views(f"$KV.{subjects.state_bucket}.lease.>"),
    )

    async def ensure() -> KeyValue:
        try:
            return await connection.js.key_value(subjects.state_bucket)
        except (BucketNotFoundError, NotFoundError):
            await connection.js.add_stream(config)
            return await connection.js.key_value(subjects.state_bucket)

    return await connection.retry(ensure, f"open bucket {subjects.state_bucket}", 20.0)


async def open_bucket(connection: Connection, subjects: Subjects, deadline: float = CONSUMER_SECONDS) -> KeyValue:
    """Open the run's KV bucket, which the owner of the run creates.

    Raises:
        BrokerError: the bucket does not exist after `deadline` seconds.
        BrokerUnreachableError: no answer within `deadline` seconds.
    """
    await wait_for_stream(connection, f"KV_{subjects.state_bucket}", deadline)

    async def bucket() -> KeyValue:
        return await connection.js.key_value(subjects.state_bucket)

    return await connection.retry(bucket, f"open bucket {subjects.state_bucket}", deadline)


async def find_consumer(
    connection: Connection, stream: str, name: str, deadline: float | None = CONSUMER_SECONDS
) -> ConsumerInfo | None:
    """Return the state of a consumer, or None; raises BrokerUnreachableError."""

    async def look() -> ConsumerInfo | None:
        with suppress(NotFoundError):
            state: ConsumerInfo = await connection.js.consumer_info(stream, name)
            return state
        return None

    return await connection.retry(look, f"look at consumer {name} of {stream}", deadline)


async def wait_for_consumer(
    connection: Connection, stream: str, name: str, deadline: float = CONSUMER_SECONDS
) -> ConsumerInfo:
    """Wait until the owner of the run has created a consumer, and return its state.

    Raises:
        BrokerError: the consumer does not exist after `deadline` seconds.
        BrokerUnreachableError: no answer within `deadline` seconds.
    """
    end = time.monotonic() + deadline
    while (info := await find_consumer(connection, stream, name, deadline)) is None:
        if time.monotonic() > end:
            msg = f"consumer {name} of stream {stream} was not created within {deadline:g} s; is the run up?"
            raise BrokerError(msg)
        connection.on_wait()
        await asyncio.sleep(0.1)
    return info


async def ensure_consumer(connection: Connection, stream: str, spec: ConsumerConfig) -> None:
    """Create or update a durable consumer; raises BrokerError if the server refuses it."""

    async def ensure() -> Any:
        return await connection.js.add_consumer(stream, spec)

    try:
        await connection.retry(ensure, f"create consumer {spec.durable_name}")
    except APIError as error:
        msg = f"broker {connection.address.url} refuses consumer {spec.durable_name} of {stream}: {error.description}"
        raise BrokerError(msg) from error


async def remove_consumer(connection: Connection, stream: str, name: str) -> None:
    """Remove a durable consumer, if it exists."""

    async def remove() -> None:
        with suppress(NotFoundError):
            await connection.js.delete_consumer(stream, name)

    await connection.retry(remove, f"remove consumer {name} of {stream}")
