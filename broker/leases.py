"""Leases with a time to live, incarnation counts and failure counts, in the run's KV bucket."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import xxhash
from nats.js.errors import APIError, InvalidKeyError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from broker.connection import Connection
from broker.errors import SubjectError
from broker.subjects import RowId


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of actors while they handled a row, and the last error."""

    count: int = 0
    """Failures of the actor itself."""
    external_kills: int = 0
    """Actors killed from outside, counted apart."""
    error: str = ""
    traceback: str = ""


COUNTS = ("count", "external_kills")
_WRONG_LAST_SEQUENCE = 10071


def _checksum(key: str, entry: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest("|".join([key, *(str(entry.get(name, 0)) for name in COUNTS)]).encode())


def _verified(key: str, value: Any) -> dict[str, Any]:
    """Return an entry of counts if its checksum matches; empty if it is malformed or foreign."""
    if not isinstance(value, dict) or any(type(value.get(name, 0)) is not int for name in COUNTS):
        return {}
    return value if value.get("checksum") == _checksum(key, value) else {}


def _whole_seconds(ttl: float) -> float:
    return max(1.0, float(int(ttl)))


class RunState:
    """The run's KV bucket. All methods run in the connection's loop.

    Args:
        connection: the process's connection.
        bucket: the bucket, from `ensure_bucket`.
    """

    def __init__(self, connection: Connection, bucket: KeyValue) -> None:
        self._connection = connection
        self._kv = bucket
        self._bucket: str = bucket._name  # noqa: SLF001 nats-py has no public name for it

    async def _entry(self, key: str) -> tuple[Any, int]:
        """Return the value of a key (None if absent or not JSON) and its revision (0 if absent)."""

        async def get() -> tuple[Any, int]:
            try:
                entry = await self._kv.get(key)
            except KeyNotFoundError:
                return None, 0
            try:
                return json.loads(entry.value or b"null"), entry.revision or 0
            except (ValueError, RecursionError):
                return None, entry.revision or 0

        return await self._connection.retry(get, f"read {key}")

    async def next_incarnation(self, role: str, n: int) -> int:
        """Start a new incarnation of an actor and return its number.

        Numbers begin at 1 and never repeat. A malformed entry counts as its KV revision, which is at least as large as
        any earlier count.
        """
        return await self._increment(f"incarnation.{role}.{n}", "count", {}, default=lambda revision: revision)

    async def incarnations(self, role: str, n: int) -> int:
        """Return the number of the latest incarnation of an actor; 0 if there was none."""
        key = f"incarnation.{role}.{n}"
        value, _ = await self._entry(key)
        return int(_verified(key, value).get("count", 0))

    async def count_failure(
        self, role: str, row: RowId, error: str, traceback: str, *, external_kill: bool = False
    ) -> int:
        """Count one failure of an actor while it handled a row and return the new count.

        Args:
            role: role of the actor.
            row: row that the actor was handling.
            error: the error in one line; only the last one is kept.
            traceback: its traceback, or the stack of a hung handler.
            external_kill: the actor was killed from outside; such deaths are counted apart.
        """
        name = "external_kills" if external_kill else "count"
        last = {"error": error[:2000], "traceback": traceback[-8000:]}
        return await self._increment(f"failure.{role}.{row}", name, last, default=lambda _: 0)

    async def failures(self, role: str, row: RowId) -> Failures:
        """Return the failures counted for a row in a role; malformed entries are ignored."""
        key = f"failure.{role}.{row}"
        value, _ = await self._entry(key)
        entry = _verified(key, value)
        texts = (str(entry.get(name, "")) for name in ("error", "traceback"))
        return Failures(*(entry.get(name, 0) for name in COUNTS), *texts)

    async def forget_failures(self, gone: Callable[[RowId], bool]) -> None:
        """Purge the failure counts of the rows for which `gone` is true."""
        for key in await self._keys("failure"):
            row = key.split(".", 2)[2]
            with suppress(SubjectError):
                if gone(RowId.parse(row)):
                    await self._purge(key)

    async def _purge(self, key: str) -> None:
        async def purge() -> bool:
            return await self._connection.js.purge_stream(f"KV_{self._bucket}", subject=f"$KV.{self._bucket}.{key}")

        await self._connection.retry(purge, f"purge {key}")

    async def _keys(self, kind: str) -> list[str]:
        """List the keys that begin with `<kind>.`."""
        prefix = f"$KV.{self._bucket}."

        async def subjects() -> list[str]:
            info = await self._connection.js.stream_info(f"KV_{self._bucket}", subjects_filter=f"{prefix}{kind}.>")
            return [subject.removeprefix(prefix) for subject in info.state.subjects or {}]

        return await self._connection.retry(subjects, f"list {kind} keys")

    async def _increment(self, key: str, name: str, extra: dict[str, Any], default: Callable[[int], int]) -> int:
        """Add 1 to a count by compare-and-swap.

        `default` maps the revision of an absent or malformed entry to the count to start from.
        """

        async def attempt() -> int:
            while True:
                value, revision = await self._entry(key)
                entry = _verified(key, value)
                count = (entry.get(name, 0) if entry else default(revision)) + 1
                new = {**entry, name: count, **extra}
                new["checksum"] = _checksum(key, new)
                try:
                    await self._kv.update(key, json.dumps(new).encode(), last=revision)
                except KeyWrongLastSequenceError:
                    continue
                return count

        return await self._connection.retry(attempt, f"increment {key}")

    async def get(self, key: str) -> Any:
        """Return the JSON value of a key; None if the key is absent or its value is not JSON."""
        return (await self._entry(key))[0]

    async def put(self, key: str, value: Any) -> None:
        """Set a key to a value that JSON can represent."""
        data = json.dumps(value).encode()
        await self._connection.retry(lambda: self._kv.put(key, data), f"write {key}")

    async def update(self, key: str, change: Callable[[Any], Any]) -> None:
        """Replace the value of a key by compare-and-swap, so that no concurrent write is lost.

        Args:
            key: key in the bucket.
            change: maps the current value (None if absent) to the new one. Called again after a concurrent write.
                Exceptions that it raises propagate.
        """

        async def attempt() -> None:
            while True:
                value, revision = await self._entry(key)
                try:
                    await self._kv.update(key, json.dumps(change(value)).encode(), last=revision)
                except KeyWrongLastSequenceError:
                    continue
                return

        await self._connection.retry(attempt, f"change {key}")

    async def acquire_lease(self, role: str, n: int | str, state: dict[str, Any], ttl: float) -> bool:
        """Acquire a free lease; False if it is held.

        The holder may be the caller itself: an earlier attempt may have succeeded although its reply was lost.
        """
        key, data = f"lease.{role}.{n}", json.dumps(state).encode()
        value, revision = await self._entry(key)
        if isinstance(value, dict):
            return False

        async def take() -> bool:
            try:
                if revision:
                    # An expired lease leaves a marker, which nats-py's `create` takes for a value.
                    last = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
                    await self._connection.js.publish(
                        f"$KV.{self._bucket}.{key}", data, headers=last, msg_ttl=_whole_seconds(ttl)
                    )
                else:
                    await self._kv.create(key, data, msg_ttl=_whole_seconds(ttl))
            except KeyWrongLastSequenceError:
                return False
            except APIError as error:
                if error.err_code != _WRONG_LAST_SEQUENCE:
                    raise
                return False
            return True

        return await self._connection.retry(take, f"acquire {key}")

    async def renew_lease(self, role: str, n: int | str, state: dict[str, Any], ttl: float) -> None:
        """Write a lease without checking who holds it; `state` describes the holder.

        It expires after `ttl` seconds, rounded down to whole seconds, at least 1.
        """
        key = f"lease.{role}.{n}"
        await self._connection.js.publish(
            f"$KV.{self._bucket}.{key}", json.dumps(state).encode(), msg_ttl=_whole_seconds(ttl)
        )

    async def renew_held_lease(self, role: str, n: int | str, state: dict[str, Any], ttl: float) -> bool:
        """Renew a lease that was acquired with the same `state`; False if another holder has it now.

        An entry whose keys differ from those of `state` is malformed and is overwritten.
        """
        value, _ = await self._entry(f"lease.{role}.{n}")
        if isinstance(value, dict) and value.keys() == state.keys() and value != state:
            return False
        await self.renew_lease(role, n, state, ttl)
        return True

    async def release_lease(self, role: str, n: int | str) -> None:
        """Delete a lease before it expires."""
        await self._kv.delete(f"lease.{role}.{n}")

    async def leases(self, role: str = "") -> dict[str, dict[str, Any]]:
        """Return the state of all current leases, or of those of one role, by `<role>.<n>`."""
        found = {}
        for key in await self._keys(f"lease.{role}" if role else "lease"):
            with suppress(InvalidKeyError):
                value, _ = await self._entry(key)
                if isinstance(value, dict):
                    found[key.removeprefix("lease.")] = value
        return found
