"""The streams of a run as data, made or brought up to date in one place."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import APIError, BadRequestError, BucketNotFoundError, NotFoundError
from nats.js.kv import KeyValue

from broker.codec import MAX_CELL_BYTES
from broker.connection import Bridge
from broker.errors import BrokerError
from broker.subjects import Subjects

_DUPLICATES_SECONDS = 120.0
MAX_LOG_BYTES = 256 << 10
_HEADERS = 4 << 10
MAX_ACTORS = 8192
"""Actors of a role that may wait for rows at once; the server's own limit is 512."""
_NAME_IN_USE = 10058


def table_spec(subjects: Subjects, max_bytes: int, replicas: int = 1) -> StreamConfig:
    """The table: one message a subject, and a second one is refused for as long as the first is there."""
    return StreamConfig(
        name=subjects.table_stream,
        subjects=subjects.table_subjects(),
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        max_bytes=max_bytes,
        max_msg_size=MAX_CELL_BYTES + _HEADERS,
        num_replicas=replicas,
        allow_direct=True,
    )


def log_spec(subjects: Subjects, max_bytes: int, max_age: float, replicas: int = 1) -> StreamConfig:
    """Events and metrics, bounded by size and age (seconds)."""
    return StreamConfig(
        name=subjects.log_stream,
        subjects=subjects.log_subjects(),
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_bytes=max_bytes,
        max_msg_size=MAX_LOG_BYTES + _HEADERS,
        max_age=max_age,
        num_replicas=replicas,
        allow_direct=True,
    )


def pool_spec(name: str, filters: list[str], ack_wait: float, max_ack_pending: int) -> ConsumerConfig:
    """The one consumer that all actors of a role share.

    A message is delivered again until it is acknowledged: how often a row may fail is the role's decision, which
    knows a delivery that killed an actor from one that merely waited in its hands.
    """
    return ConsumerConfig(
        durable_name=name,
        filter_subjects=filters,
        ack_policy=AckPolicy.EXPLICIT,
        deliver_policy=DeliverPolicy.ALL,
        ack_wait=ack_wait,
        max_deliver=-1,
        max_ack_pending=max_ack_pending,
        max_waiting=MAX_ACTORS,
    )


async def ensure_streams(bridge: Bridge, specs: list[StreamConfig], deadline: float = 20.0) -> None:
    """Make the streams, or update those that are there; safe to call by several processes at once.

    Raises:
        BrokerError: the server refuses, e.g. for want of room; says which stream and why.
    """
    for spec in specs:

        async def ensure(spec: StreamConfig = spec) -> None:
            try:
                await bridge.js.stream_info(str(spec.name))
            except NotFoundError:
                try:
                    await bridge.js.add_stream(spec)
                except BadRequestError as error:
                    if error.err_code != _NAME_IN_USE:
                        raise
            else:
                await bridge.js.update_stream(spec)

        try:
            await bridge.persist(ensure, f"make stream {spec.name}", deadline)
        except APIError as error:
            msg = f"broker {bridge.address.url} refuses stream {spec.name}: {error.description}"
            raise BrokerError(msg) from error


async def wait_for_stream(bridge: Bridge, name: str, deadline: float) -> None:
    """Wait until somebody has made a stream.

    Raises:
        BrokerError: nobody did within `deadline` seconds.
    """
    end = time.monotonic() + deadline

    async def look() -> bool:
        try:
            await bridge.js.stream_info(name)
        except NotFoundError:
            return False
        return True

    while not await bridge.persist(look, f"wait for stream {name}", deadline):
        if time.monotonic() > end:
            msg = f"stream {name} was not made within {deadline:g} s"
            raise BrokerError(msg)
        await asyncio.sleep(0.1)


async def ensure_bucket(bridge: Bridge, subjects: Subjects, replicas: int = 1) -> KeyValue:
    """The run's KV bucket for leases (with a time to live each), incarnations and failure counts.

    Made here and not by nats-py, whose buckets allow roll-ups: who may write a single key could clear them all.
    """
    config = StreamConfig(
        name=f"KV_{subjects.state_bucket}",
        subjects=[f"$KV.{subjects.state_bucket}.>"],
        storage=StorageType.FILE,
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        duplicate_window=_DUPLICATES_SECONDS,
        num_replicas=replicas,
        allow_msg_ttl=True,
        allow_rollup_hdrs=False,
        deny_delete=True,
    )

    async def ensure() -> KeyValue:
        try:
            return await bridge.js.key_value(subjects.state_bucket)
        except (BucketNotFoundError, NotFoundError):
            await bridge.js.add_stream(config)
            return await bridge.js.key_value(subjects.state_bucket)

    return await bridge.persist(ensure, f"open bucket {subjects.state_bucket}", 20.0)


async def ensure_consumer(bridge: Bridge, stream: str, spec: ConsumerConfig) -> None:
    """Make a durable consumer, or update it."""

    async def ensure() -> Any:
        return await bridge.js.add_consumer(stream, spec)

    try:
        await bridge.persist(ensure, f"make consumer {spec.durable_name}")
    except APIError as error:
        msg = f"broker {bridge.address.url} refuses consumer {spec.durable_name} of {stream}: {error.description}"
        raise BrokerError(msg) from error
