"""Entries of leases: what a message must be to count as a lease.

A lease has exactly the fields of its kind, the checksum that binds them to its key, and a time to live. Whatever else a
client has stored under the key of a lease is ignored: a message that the server delivered or copied there, an answer to
a request, an entry that would never expire.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import xxhash

from broker.bucket_keys import lease_kind

MAX_LEASE_TTL = 3600.0
"""Longest time to live, in seconds."""
MAX_LEASE_BYTES = 1 << 20
CHECKSUM = "checksum"
_SECONDS = re.compile(r"[1-9][0-9]{0,8}")
Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_texts(value: Any) -> bool:
    return type(value) is list and all(map(_is_text, value))


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_map(value: Any) -> bool:
    return type(value) is dict


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_version(value: Any) -> bool:
    return type(value) is int and value >= -1


_ACTOR: dict[str, Check] = {
    "pid": _is_count,
    "incarnation": _is_count,
    "since": _is_number,
    "rows": _is_texts,
    "waits_for": _or_none(_is_text),
    "doing_since": _or_none(_is_number),
}
_MORE_OF_ACTOR: dict[str, Check] = {
    "weights": _is_version,
    "handled": _is_count,
    "has_worked": _is_flag,
    "code": _is_text,
}
_NODE: dict[str, Check] = {"name": _is_text, "where": _is_text}
_MORE_OF_NODE: dict[str, Check] = {
    "since": _is_number,
    "pid": _is_count,
    "children": _is_map,
    "zygote": _or_none(_is_map),
    "gpus": _is_map,
    "room": _is_map,
    "spot": _is_flag,
    "machine": _is_map,
}
_ROOT: dict[str, Check] = {"pid": _is_count, "since": _is_number, "children": _is_map}
_OWNER: dict[str, Check] = {"node": _is_count, **_NODE}
_MORE_OF_OWNER: dict[str, Check] = {"moved": _is_flag}
_KINDS = {"node": (_NODE, _MORE_OF_NODE), "root": (_ROOT, {}), "owner": (_OWNER, _MORE_OF_OWNER)}
"""Required and optional fields of the leases that are not held by actors."""


def signed(key: str, state: dict[str, Any]) -> bytes:
    """Encode the state of a lease, bound to its key."""
    return json.dumps({**state, CHECKSUM: _checksum(key, state)}).encode()


def lease_of(key: str, data: bytes, headers: dict[str, str] | None) -> dict[str, Any] | str:
    """Return the state of a lease, or why a message is no valid lease."""
    kind = lease_kind(key)
    if kind is None:
        return "its key names no lease"
    ttl = (headers or {}).get("Nats-TTL", "")
    if not _SECONDS.fullmatch(ttl) or int(ttl) > MAX_LEASE_TTL:
        return f"its time to live is {ttl[:20] or 'unlimited'}, not at most {MAX_LEASE_TTL:g} s"
    try:
        body = json.loads(data) if len(data) <= MAX_LEASE_BYTES else None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return "it is not a JSON object"
    checksum = body.pop(CHECKSUM, None)
    if checksum != _checksum(key, body):
        return "its checksum does not match its key and content"
    required, optional = _KINDS.get(kind, (_ACTOR, _MORE_OF_ACTOR))
    known = required | optional
    if not required.keys() <= body.keys() <= known.keys() or not all(known[name](body[name]) for name in body):
        return "it has not the fields of a lease"
    return body


def _checksum(key: str, state: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(f"{key}\0{json.dumps(state, sort_keys=True)}".encode())
