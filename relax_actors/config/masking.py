"""Settings and command lines without their secrets, for output."""

from __future__ import annotations

import re
from typing import Any

_SECRET = re.compile(r"(^|_)(password|passwd|secret|token|api_key|access_key|private_key)$")
# Up to the last @ of a server: a password may contain one, and commas separate the servers of a cluster.
_ACCOUNT = re.compile(r"(?<=://)(?:(?!,\w+://)[^/\s])*@")


def masked(value: Any, name: str = "") -> Any:
    """Return settings as plain data with passwords, tokens and keys, told by their names, as `***`."""
    if isinstance(value, dict):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name) for inner in value]
    if value is not None and _SECRET.search(name):
        return "***"
    return _ACCOUNT.sub("***@", value) if isinstance(value, str) else value


def masked_argument(argument: str) -> str:
    """Return an argument of a command, such as `section.key=value`, with its secrets as `***`."""
    key, equals, value = str(masked(argument)).partition("=")
    return f"{key}{equals}{masked(value, key.rpartition('.')[2])}"
