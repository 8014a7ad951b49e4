"""Environment of child processes: each gets the secrets that it needs, and no others."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_NAME = re.compile(
    r"(^|_)(TOKENS?|SECRETS?|PASS|PASSWORD|PASSWD|PASSPHRASE|KEYS?|APIKEY|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE
)
_ACCOUNT = re.compile(r"://[^/\s]*:[^/\s]*@")


def without_secrets(environment: Mapping[str, str], wanted: Collection[str] = ()) -> dict[str, str]:
    """Return an environment without secrets: variables named like one, and URLs with a password."""
    return {name: value for name, value in environment.items() if name in wanted or not is_secret(name, value)}


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks like a secret, e.g. `WANDB_API_KEY` or a proxy's URL with a password."""
    return _NAME.search(name) is not None or _ACCOUNT.search(value) is not None
