"""Leases with a time to live, counts of lives, and counts of failures, in the run's KV bucket."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import xxhash
from nats.js.errors import APIError, InvalidKeyError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from broker.connection import Bridge
from broker.errors import SubjectError
from broker.subjects import RowId


@dataclass(frozen=True, slots=True)
class Failures:
    """How often an actor failed with a row in hand: by itself (`count`), killed from `outside`; and the last error."""

    count: int = 0
    outside: int = 0
    error: str = ""
    traceback: str = ""


COUNTS = ("count", "outside")
_WRONG_LAST_SEQUENCE = 10071


def _checksum(key: str, entry: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest("|".join([key, *(str(entry.get(name, 0)) for name in COUNTS)]).encode())


def _own(key: str, value: Any) -> dict[str, Any]:
    """An entry of counts that was written here; empty if it is none, or somebody else's."""
    if not isinstance(value, dict) or any(type(value.get(name, 0)) is not int for name in COUNTS):
        return {}
    return value if value.get("checksum") == _checksum(key, value) else {}


class RunState:
    """The run's KV bucket; all methods run in the bridge's loop."""

    def __init__(self, bridge: Bridge, bucket: KeyValue) -> None:
        self._bridge = bridge
        self._kv = bucket
        self._bucket: str = bucket._name  # noqa: SLF001 nats-py has no public name for it
        if bridge.address.credentials is not None:
            bucket._direct = False  # noqa: SLF001 see `broker.permissions`

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

        An entry that is not ours is taken for its revision: that is no less than any count before it.
        """
        return await self._advance(f"incarnation.{role}.{n}", "count", {}, lost=lambda revision: revision)

    async def lives(self, role: str, n: int) -> int:
        """How many lives of an actor were counted; the last of them has this number as its incarnation."""
        key = f"incarnation.{role}.{n}"
        value, _ = await self._get(key)
        return int(_own(key, value).get("count", 0))

    async def count_failure(self, role: str, row: RowId, error: str, traceback: str, *, outside: bool = False) -> int:
        """Count one more time that an actor of `role` failed with a row in hand; remembers the last error.

        Args:
            role: the role.
            row: what the actor had in hand.
            error: what happened, in a line.
            traceback: where.
            outside: it was killed from outside; such deaths are counted apart.
        """
        name = "outside" if outside else "count"
        last = {"error": error[:2000], "traceback": traceback[-8000:]}
        return await self._advance(f"failure.{role}.{row}", name, last, lost=lambda _: 0)

    async def failures(self, role: str, row: RowId) -> Failures:
        """What was counted of a row in a role; an entry that is none counts not."""
        key = f"failure.{role}.{row}"
        value, _ = await self._get(key)
        entry = _own(key, value)
        texts = (str(entry.get(name, "")) for name in ("error", "traceback"))
        return Failures(*(entry.get(name, 0) for name in COUNTS), *texts)

    async def forget_failures(self, gone: Callable[[RowId], bool]) -> None:
        """Remove the counts of the rows that are gone, without a trace."""
        for key in await self._keys("failure"):
            row = key.split(".", 2)[2]
            with suppress(SubjectError):
                if gone(RowId.parse(row)):
                    await self._purge(key)

    async def _purge(self, key: str) -> None:
        async def purge() -> bool:
            return await self._bridge.js.purge_stream(f"KV_{self._bucket}", subject=f"$KV.{self._bucket}.{key}")

        await self._bridge.persist(purge, f"purge {key}")

    async def _keys(self, kind: str) -> list[str]:
        """The keys that begin with `<kind>.`."""
        prefix = f"$KV.{self._bucket}."

        async def subjects() -> list[str]:
            info = await self._bridge.js.stream_info(f"KV_{self._bucket}", subjects_filter=f"{prefix}{kind}.>")
            return [subject.removeprefix(prefix) for subject in info.state.subjects or {}]

        return await self._bridge.persist(subjects, f"list {kind} keys")

    async def _advance(self, key: str, name: str, extra: dict[str, Any], lost: Callable[[int], int]) -> int:
        async def attempt() -> int:
            while True:
                value, revision = await self._get(key)
                entry = _own(key, value)
                count = (entry.get(name, 0) if entry else lost(revision)) + 1
                new = {**entry, name: count, **extra}
                new["checksum"] = _checksum(key, new)
                try:
                    await self._kv.update(key, json.dumps(new).encode(), last=revision)
                except KeyWrongLastSequenceError:
                    continue
                return count

        return await self._bridge.persist(attempt, f"advance {key}")

    async def fetch(self, key: str) -> Any:
        """What was put under a key; None if nothing was, or it is no JSON."""
        return (await self._get(key))[0]

    async def put(self, key: str, value: Any) -> None:
        """Put plain data under a key."""
        data = json.dumps(value).encode()
        await self._bridge.persist(lambda: self._kv.put(key, data), f"write {key}")

    async def change(self, key: str, change: Callable[[Any], Any]) -> None:
        """Put what `change` makes of the plain data under a key, of which nothing written meanwhile is lost.

        Args:
            key: of the bucket.
            change: given None if nothing is there; called again if somebody else was faster. What it raises is raised.
        """

        async def attempt() -> None:
            while True:
                value, revision = await self._get(key)
                try:
                    await self._kv.update(key, json.dumps(change(value)).encode(), last=revision)
                except KeyWrongLastSequenceError:
                    continue
                return

        await self._bridge.persist(attempt, f"change {key}")

    async def claim_lease(self, role: str, n: int | str, state: dict[str, Any], ttl: float) -> bool:
        """Take a lease that nobody holds; False if somebody does, oneself it may be: an answer can be lost."""
        key, data = f"lease.{role}.{n}", json.dumps(state).encode()

        seconds = max(1.0, float(int(ttl)))
        value, revision = await self._get(key)
        if isinstance(value, dict):
            return False

        async def take() -> bool:
            try:
                if revision:
                    # One that ran out leaves a marker, which nats-py's `create` takes for a value.
                    last = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
                    await self._bridge.js.publish(f"$KV.{self._bucket}.{key}", data, headers=last, msg_ttl=seconds)
                else:
                    await self._kv.create(key, data, msg_ttl=seconds)
            except KeyWrongLastSequenceError:
                return False
            except APIError as error:
                if error.err_code != _WRONG_LAST_SEQUENCE:
                    raise
                return False
            return True

        return await self._bridge.persist(take, f"claim {key}")

    async def renew_lease(self, role: str, n: int | str, state: dict[str, Any], ttl: float) -> None:
        """Say that an actor lives, and what it does; forgotten after `ttl` seconds (whole, at least 1)."""
        key = f"lease.{role}.{n}"
        await self._bridge.js.publish(
            f"$KV.{self._bucket}.{key}",
            json.dumps(state).encode(),
            msg_ttl=max(1.0, float(int(ttl))),
        )

    async def keep_lease(self, role: str, n: int | str, state: dict[str, Any], ttl: float) -> bool:
        """Renew a lease that was claimed with the same `state`; False if somebody else has it by now.

        An entry with other keys than those of `state` is nobody's claim.
        """
        value, _ = await self._get(f"lease.{role}.{n}")
        if isinstance(value, dict) and value.keys() == state.keys() and value != state:
            return False
        await self.renew_lease(role, n, state, ttl)
        return True

    async def drop_lease(self, role: str, n: int | str) -> None:
        """End a lease in order."""
        await self._kv.delete(f"lease.{role}.{n}")

    async def leases(self) -> dict[str, dict[str, Any]]:
        """All living leases by `<role>.<n>`."""
        found = {}
        for key in await self._keys("lease"):
            with suppress(InvalidKeyError):
                value, _ = await self._get(key)
                if isinstance(value, dict):
                    found[key.removeprefix("lease.")] = value
        return found
