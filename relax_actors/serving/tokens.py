"""Bearer tokens of the gateway and of its sessions."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path

from broker.files import write_private
from relax_actors.errors import ConfigError

MIN_TOKEN = 16
"""Fewest characters of a token in a file of the user's."""


def load_or_create_secret(path: Path) -> str:
    """Return the secret in a private file; create it with a random secret if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        write_private(own, secrets.token_urlsafe(32))
        try:
            path.hardlink_to(own)  # the first writer wins, so that all processes read the same secret
        except FileExistsError:
            pass
        finally:
            own.unlink(missing_ok=True)
    return path.read_text().strip()


def read_tokens(path: Path, setting: str = "gateway.token_file") -> tuple[str, ...]:
    """Return the tokens in a file, one a line; raises ConfigError if short or not private."""
    try:
        mode = path.stat().st_mode & 0o077
        tokens = tuple(line.strip() for line in path.read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{setting} {path} cannot be read ({error}); write one token a line"
        raise ConfigError(msg) from error
    if mode:
        msg = f"{setting} {path} may be read by other users (mode {mode:03o}); run chmod 600 {path}"
        raise ConfigError(msg)
    if not tokens or any(len(token) < MIN_TOKEN or not token.isascii() for token in tokens):
        msg = f"{setting} {path} needs tokens of at least {MIN_TOKEN} ASCII characters, one a line"
        raise ConfigError(msg)
    return tokens


def session_token(secret: str, session: str) -> str:
    """Return the bearer token of a session, from which nobody can tell that of another one."""
    return hmac.new(secret.encode(), session.encode(), hashlib.sha256).hexdigest()


def is_any(given: str, tokens: Iterable[str]) -> bool:
    """Whether a token is one of some, in a time that does not depend on how much of it is right."""
    equal = False
    for token in tokens:
        equal |= hmac.compare_digest(given.encode(), token.encode())
    return equal
