"""Transport `"store"`: actors read the weight files in the store."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from relax_actors.errors import CodecError
from relax_actors.messages import Weights
from relax_actors.runtime import Context
from relax_actors.weights.protocols import WeightCopy, WeightProducer, WeightUpdate
from relax_actors.weights.transports.base import WeightTransport

if TYPE_CHECKING:
    from broker.table import Table


class StoreTransport(WeightTransport):
    """Sends nothing; receivers read the files. See `WeightTransport`."""

    def __init__(self, context: Context) -> None:
        self._table = context.table

    def make_sender(self, engine: WeightProducer) -> StoreSender:
        """Return a sender that does nothing."""
        del engine
        return StoreSender()

    def make_receiver(self, *, follows: bool) -> StoreReceiver:
        """Return a receiver that reads the files."""
        del follows
        return StoreReceiver(self._table)


class StoreSender:
    """Does nothing: the publisher has written the files."""

    def offer(self, published: Weights) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class StoreReceiver:
    """Reads the files that lead from a copy, or from the last full set, to a version."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def update(self, copy: WeightCopy, target: Weights) -> bool:
        """Advance a copy by reading files; see `Receiver`."""
        updates = self.updates_to(target, copy.version)
        if updates:
            copy.apply(updates)
        return updates is not None

    def updates_to(self, target: Weights, current: int | None) -> list[WeightUpdate] | None:
        """Follow the chain of deltas back from `target`; see `Receiver`."""
        updates: list[WeightUpdate] = []
        cell: Weights | None = target
        while cell is not None and cell.version != current:
            shards = [self._table.store.path(shard.path) for shard in cell.shards]
            if not all(shard.exists() for shard in shards):
                return None
            updates.insert(0, WeightUpdate(cell.version, cell.fingerprint, shards))
            # A lost delta may have been rewritten as a full set.
            if cell.base_version is None or all(map(_is_full_set, shards)):
                return updates
            cell = fetch_published(self._table, cell.base_version)
        return updates if cell is not None else None

    def close(self) -> None:
        """Do nothing."""


def fetch_published(table: Table, version: int) -> Weights | None:
    """Return the cell of a version; None if it is missing or malformed.

    The trainer replaces malformed cells.
    """
    with suppress(CodecError):
        return table.fetch(table.subjects.numbered("weights", version), Weights)
    return None


def _is_full_set(shard: Path) -> bool:
    from relax_actors.weights.files import delta_base  # noqa: PLC0415 imports torch; simulated engines run without it

    return delta_base(shard) is None
