"""Durable table of write-once cells on NATS JetStream, with large tensors in a store.

Names are imported on first use, so `import broker` costs next to nothing. `broker.process`, which supervisors import,
does not import NATS or NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.lazy import lazy

if TYPE_CHECKING:
    from broker.address import Address
    from broker.codec import Envelope, decode, encode
    from broker.connection import Connection
    from broker.errors import (
        AddressError,
        BrokerError,
        BrokerFullError,
        BrokerUnreachableError,
        CodecError,
        RelaxError,
        StoreError,
        StoreFullError,
        SubjectError,
    )
    from broker.fields import TensorRef
    from broker.leases import Failures, RunState
    from broker.ordered_consumer import OrderedConsumer
    from broker.pull import Delivery, PullSubscription
    from broker.server import Server, ServerSettings
    from broker.store import Store
    from broker.streams import ensure_bucket, ensure_consumer, ensure_streams
    from broker.subjects import CellId, Kinds, RowId, Subjects
    from broker.table import Cell, Table
else:
    __getattr__ = lazy(__name__)

__all__ = [
    "Address",
    "AddressError",
    "BrokerError",
    "BrokerFullError",
    "BrokerUnreachableError",
    "Cell",
    "CellId",
    "CodecError",
    "Connection",
    "Delivery",
    "Envelope",
    "Failures",
    "Kinds",
    "OrderedConsumer",
    "PullSubscription",
    "RelaxError",
    "RowId",
    "RunState",
    "Server",
    "ServerSettings",
    "Store",
    "StoreError",
    "StoreFullError",
    "SubjectError",
    "Subjects",
    "Table",
    "TensorRef",
    "decode",
    "encode",
    "ensure_bucket",
    "ensure_consumer",
    "ensure_streams",
]
