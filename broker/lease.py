"""Leases with a time to live, counts of lives, and counts of failures, in the run's KV bucket."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nats.js.errors import InvalidKeyError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from broker.bridge import Bridge
from broker.subjects import RowId


def _count(value: Any, revision: int) -> int | None:
    """The count in an entry, None if there is none; it can be no more than the writes that the bucket has seen."""
    count = value.get("count") if isinstance(value, dict) else None
    return count if type(count) is int and 0 < count <= revision else None


class RunState:
    """The run's KV bucket; all methods run in the bridge's loop."""

    def __init__(self, bridge: Bridge, bucket: KeyValue) -> None:
        self._bridge = bridge
        self._kv = bucket
        self._bucket: str = bucket._name  # noqa: SLF001 nats-py has no public name for it

    async def _get(self, key: str) -> tuple[Any, int]:
        async def get() -> tuple[Any, int]:
            try:
                entry = await self._kv.get(key)
            except KeyNotFoundError:
                return None, 0
            try:
                return json.loads(entry.value or b"null"), entry.revision or 0
            except (ValueError, RecursionError):
                return None, entry.revision or 0

        return await self._bridge.persist(get, f"read {key}")

    async def next_incarnation(self, role: str, n: int) -> int:
        """Count one more life of an actor; every caller gets a number of its own, from 1 on.

        An entry that cannot be read is taken for its revision: that is no less than any count before it.
        """
        return int((await self._advance(f"incarnation.{role}.{n}", {}, lost=lambda revision: revision))["count"])

    async def count_failure(self, role: str, row: RowId, error: str, traceback: str) -> int:
        """Count one more time that a row made an actor of `role` fail; remembers the last error."""
        last = {"error": error[:2000], "traceback": traceback[-8000:]}
        return int((await self._advance(f"failure.{role}.{row}", last, lost=lambda _: 0))["count"])

    async def failures(self, role: str, row: RowId) -> dict[str, Any] | None:
        """`count`, `error` and `traceback` of a row's failures in a role, or None; an entry that is none counts not."""
        value, revision = await self._get(f"failure.{role}.{row}")
        if _count(value, revision) is None:
            return None
        return {"count": value["count"], **{name: str(value.get(name, "")) for name in ("error", "traceback")}}

    async def _advance(self, key: str, extra: dict[str, Any], lost: Callable[[int], int]) -> dict[str, Any]:
        async def attempt() -> dict[str, Any]:
            while True:
                value, revision = await self._get(key)
                count = _count(value, revision)
                new = {"count": (lost(revision) if count is None else count) + 1, **extra}
                try:
                    await self._kv.update(key, json.dumps(new).encode(), last=revision)
                except KeyWrongLastSequenceError:
                    continue
                return new

        return await self._bridge.persist(attempt, f"advance {key}")

    async def renew_lease(self, role: str, n: int, state: dict[str, Any], ttl: float) -> None:
        """Say that an actor lives, and what it does; forgotten after `ttl` seconds (whole, at least 1)."""
        key = f"lease.{role}.{n}"
        await self._bridge.js.publish(
            f"$KV.{self._bucket}.{key}",
            json.dumps(state).encode(),
            msg_ttl=max(1.0, float(int(ttl))),
        )

    async def drop_lease(self, role: str, n: int) -> None:
        """End a lease in order."""
        await self._kv.delete(f"lease.{role}.{n}")

    async def leases(self) -> dict[str, dict[str, Any]]:
        """All living leases by `<role>.<n>`."""
        prefix = f"$KV.{self._bucket}."

        async def subjects() -> dict[str, int]:
            info = await self._bridge.js.stream_info(f"KV_{self._bucket}", subjects_filter=f"{prefix}lease.>")
            return info.state.subjects or {}

        found = {}
        for subject in await self._bridge.persist(subjects, "list leases"):
            key = subject.removeprefix(prefix)
            with suppress(InvalidKeyError):
                value, _ = await self._get(key)
                if isinstance(value, dict):
                    found[key.removeprefix("lease.")] = value
        return found
