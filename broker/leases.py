"""Leases with a time to live, incarnation counts and failure counts, in the run's KV bucket."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import xxhash
from nats.js.api import RawStreamMsg
from nats.js.errors import APIError, KeyNotFoundError, KeyWrongLastSequenceError, NotFoundError
from nats.js.kv import KeyValue

from broker.bucket_keys import failed_row, failure_key, incarnation_key, lease_key, role_of
from broker.connection import Connection
from broker.lease_entries import MAX_LEASE_TTL, lease_of, signed
from broker.subjects import RowId


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of actors while they handled a row, and the last error."""

    count: int = 0
    """Failures of the actor itself."""
    external_kills: int = 0
    """Actors killed from outside, counted apart."""
    returns: int = 0
    """Actors that returned the row, because they had to leave."""
    error: str = ""
    traceback: str = ""


LARGE_BYTES, MAX_MEASURED = 4 << 20, 10_000
"""Size of the bucket from which its keys are measured, and how many at once."""
MAX_ROLE_BYTES = 16 << 20
"""Size of all keys of one role; those of a thousand actors have less than 1 MiB."""
COUNTS = ("count", "external_kills", "returns")
_WRONG_LAST_SEQUENCE = 10071


def _checksum(key: str, entry: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest("|".join([key, *(str(entry.get(name, 0)) for name in COUNTS)]).encode())


def _verified(key: str, value: Any) -> dict[str, Any]:
    """Return an entry of counts if its checksum matches; empty if it is malformed or foreign."""
    if not isinstance(value, dict) or any(type(value.get(name, 0)) is not int for name in COUNTS):
        return {}
    return value if value.get("checksum") == _checksum(key, value) else {}


def _ttl(seconds: float) -> float:
    return float(min(MAX_LEASE_TTL, max(1, int(seconds))))


class RunState:
    """The run's KV bucket. All methods run in the connection's loop."""

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
        return await self._increment(incarnation_key(role, n), "count", {}, default=lambda revision: revision)

    async def incarnations(self, role: str, n: int) -> int:
        """Return the number of the latest incarnation of an actor; 0 if there was none."""
        key = incarnation_key(role, n)
        value, _ = await self._entry(key)
        return int(_verified(key, value).get("count", 0))

    async def count_failure(
        self, role: str, row: RowId, error: str, traceback: str, *, external_kill: bool = False
    ) -> int:
        """Count one failure of an actor while it handled a row and return the new count.

        Only the last error, one line, is kept, with its traceback or the stack of a hung handler. Deaths by
        `external_kill`, a kill from outside, are counted apart.
        """
        name = "external_kills" if external_kill else "count"
        last = {"error": error[:2000], "traceback": traceback[-8000:]}
        return await self._increment(failure_key(role, row), name, last, default=lambda _: 0)

    async def count_return(self, role: str, row: RowId) -> int:
        """Count that an actor returned a row unfinished because it had to leave."""
        return await self._increment(failure_key(role, row), "returns", {}, default=lambda _: 0)

    async def failures(self, role: str, row: RowId) -> Failures:
        """Return the failures counted for a row in a role; malformed entries are ignored."""
        key = failure_key(role, row)
        value, _ = await self._entry(key)
        entry = _verified(key, value)
        texts = (str(entry.get(name, "")) for name in ("error", "traceback"))
        return Failures(*(entry.get(name, 0) for name in COUNTS), *texts)

    async def forget_failures(self, gone: Callable[[RowId], bool]) -> None:
        """Purge the failure counts of the rows for which `gone` is true."""
        for key in await self._keys("failure"):
            row = failed_row(key)
            if row is not None and gone(row):
                await self._purge(key)

    async def enforce(self, allowed: Callable[[str], int]) -> int:
        """Purge keys that are unknown, too large or too many, and return their number.

        Only for the role that may remove messages. `allowed` maps a key to its largest size in bytes; 0 if the run has
        none such.
        """
        stream, prefix = f"KV_{self._bucket}", self._subject("")

        async def read() -> tuple[list[str], int]:
            info = await self._connection.js.stream_info(stream, subjects_filter=f"{prefix}>")
            return [subject.removeprefix(prefix) for subject in info.state.subjects or {}], info.state.bytes

        keys, size = await self._connection.retry(read, "list keys")
        gone = [key for key in keys if not allowed(key)]
        if size > LARGE_BYTES:
            gone += await self._excess(set(keys[:MAX_MEASURED]) - set(gone), allowed)
        for key in gone:
            await self._purge(key)
        return len(gone)

    async def _excess(self, keys: Iterable[str], allowed: Callable[[str], int]) -> list[str]:
        """Return keys that are too large, and surplus leases and failure counts of roles.

        Leases are renewed every second, and failures are counted again from 0.
        """
        excess, left = [], {}
        for key in keys:
            with suppress(NotFoundError):
                message = await self._connection.js.get_last_msg(f"KV_{self._bucket}", self._subject(key))
                if message.subject != self._subject(key):
                    continue  # a key with a wildcard, whose purge would remove others
                if len(message.data or b"") > allowed(key):
                    excess.append(key)
                else:
                    left[key] = len(message.data or b"")
        sizes: Counter[str] = Counter()
        for key, size in left.items():
            sizes[role_of(key)] += size
        renewable = (key for key in left if key.startswith(("lease.", "failure.")))
        return excess + [key for key in renewable if sizes[role_of(key)] > MAX_ROLE_BYTES]

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

        `change` maps the current value (None if absent) to the new one, and is called again after a concurrent write.
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
        """Acquire a free lease; False if it is held. An entry that is no lease is overwritten.

        The holder may be the caller itself: an earlier attempt may have succeeded although its reply was lost.
        """
        key = lease_key(role, n)
        entry, revision = await self._lease(key)
        if isinstance(entry, dict):
            return False
        data = signed(key, state)

        async def take() -> bool:
            try:
                if revision:
                    # An expired lease leaves a marker, which nats-py's `create` takes for a value.
                    last = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
                    await self._connection.js.publish(self._subject(key), data, headers=last, msg_ttl=_ttl(ttl))
                else:
                    await self._kv.create(key, data, msg_ttl=_ttl(ttl))
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

        It expires after `ttl` seconds, rounded down to whole seconds, from 1 to `MAX_LEASE_TTL`.
        """
        key = lease_key(role, n)
        await self._connection.js.publish(self._subject(key), signed(key, state), msg_ttl=_ttl(ttl))

    async def renew_held_lease(self, role: str, n: int | str, state: dict[str, Any], ttl: float) -> bool:
        """Renew a lease that was acquired with the same `state`; False if another holder has it now."""
        lease = await self.lease(role, n)
        if lease is not None and lease != state:
            return False
        await self.renew_lease(role, n, state, ttl)
        return True

    async def release_lease(self, role: str, n: int | str) -> None:
        """Delete a lease before it expires."""
        await self._kv.delete(lease_key(role, n))

    async def lease(self, role: str, n: int | str) -> dict[str, Any] | None:
        """Return the state of a current lease; None if nobody holds it."""
        entry, _ = await self._lease(lease_key(role, n))
        return entry if isinstance(entry, dict) else None

    async def leases(self, role: str = "") -> dict[str, dict[str, Any]]:
        """Return the state of all current leases, or of those of one role, by `<role>.<n>`."""
        entries = await self._entries(role)
        return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}

    async def forged_leases(self) -> dict[str, str]:
        """Return why invalid entries under the keys of leases are ignored, by `<role>.<n>`."""
        entries = await self._entries()
        return {name: entry for name, entry in entries.items() if isinstance(entry, str)}

    async def _entries(self, role: str = "") -> dict[str, dict[str, Any] | str | None]:
        keys = await self._keys(f"lease.{role}" if role else "lease")
        entries = await asyncio.gather(*map(self._lease, keys))
        return {key.removeprefix("lease."): entry for key, (entry, _) in zip(keys, entries, strict=True)}

    async def _lease(self, key: str) -> tuple[dict[str, Any] | str | None, int]:
        """Return the state of a lease, or why its entry is invalid, or None; and its revision."""

        async def get() -> RawStreamMsg | None:
            try:
                return await self._connection.js.get_last_msg(f"KV_{self._bucket}", self._subject(key))
            except NotFoundError:
                return None

        message = await self._connection.retry(get, f"read {key}")
        if message is None:
            return None, 0
        headers = message.headers or {}
        if "KV-Operation" in headers or "Nats-Marker-Reason" in headers:
            return None, message.seq or 0  # released or expired
        return lease_of(key, message.data or b"", headers), message.seq or 0

    def _subject(self, key: str) -> str:
        return f"$KV.{self._bucket}.{key}"
