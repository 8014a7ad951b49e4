"""Keys of a run's KV bucket: all of them are built and parsed here.

lease.<role>.<n>              a live actor, with role `node` or `root` a supervisor
lease.owner.<role>            the node that runs the single actor of a role
incarnation.<role>.<n>        number of incarnations of an actor
failure.<role>.<row>          failures of actors while they handled a row
note.<name>                   address of a role
run                           settings for nodes that join

A permission with wildcards lets its holder write other tokens than these, so readers parse every key, and ignore
malformed ones.
"""

from __future__ import annotations

import re

from broker.errors import SubjectError
from broker.subjects import RowId

LEASE = re.compile(
    r"lease\.(?:(?P<kind>[A-Za-z0-9_-]{1,64})\.(?:0|[1-9][0-9]{0,8})|(?P<owner>owner)\.[A-Za-z0-9_-]{1,64})"
)


def incarnation_key(role: str, n: int) -> str:
    """Key of an actor's number of incarnations."""
    return f"incarnation.{role}.{n}"


def failure_key(role: str, row: RowId) -> str:
    """Key of the failures of a row in a role."""
    return f"failure.{role}.{row}"


def lease_key(role: str, n: int | str) -> str:
    """Key of a lease."""
    return f"lease.{role}.{n}"


def failed_row(key: str) -> RowId | None:
    """Return the row of a key of failures; None for any other key."""
    kind, _, rest = key.partition(".")
    try:
        return RowId.parse(rest.partition(".")[2]) if kind == "failure" else None
    except SubjectError:
        return None


def lease_kind(key: str) -> str | None:
    """Return the role of a key of a lease, or `node`, `root` or `owner`; None for any other key."""
    match = LEASE.fullmatch(key)
    return None if match is None else match["owner"] or match["kind"]


def role_of(key: str) -> str:
    """Return the second token of a key, its role; empty if it has only one."""
    return key.split(".", 2)[1] if "." in key else ""
