"""External engines of a run: their keys, and their rollout actors.

A key is never in a cell, which every role and observer can read: it is a file of the store that only the run's user can
read, and the request names the file.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from broker.files import make_private_folder, write_private
from relax_actors.errors import ConfigError

KEYS = "engine-keys"
MIN_AGE = 60.0
"""Seconds that a key without an engine is kept: its request may be about to be recorded."""
_NAME = re.compile(r"[0-9a-f]{32}")


def normal_url(url: str) -> str:
    """Return the recorded form of an engine's address: one for each server.

    Scheme and host are in lower case, and no slash is at the end.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return url  # `is_url` refuses it
    return urlunsplit(parts._replace(netloc=parts.netloc.lower())).rstrip("/")


def is_url(url: str) -> bool:
    """Return whether a text is the address of an HTTP server, without credentials."""
    try:
        parts = urlsplit(url)
        # Reading the port checks it.
        return bool(parts.hostname) and parts.scheme in ("http", "https") and parts.port != 0 and "@" not in url
    except ValueError:
        return False


def save_key(store: Path, key: str) -> str:
    """Write an engine's key to a file of the store; return its name, or empty."""
    if not key:
        return ""
    make_private_folder(store / KEYS)
    name = secrets.token_hex(16)
    write_private(store / KEYS / name, key)
    return name


def read_key(store: Path, name: str) -> str:
    """Return the key of an engine; raises ConfigError if the file is lost, or its name is none."""
    if not name:
        return ""
    try:
        if not _NAME.fullmatch(name):
            raise FileNotFoundError(name)
        return (store / KEYS / name).read_text()
    except OSError as error:
        msg = f"the key of the engine is not in {store / KEYS}; remove the engine, and add it again with its key"
        raise ConfigError(msg) from error


def discard_key(store: Path, name: str) -> None:
    """Remove the key of an engine whose request was not recorded."""
    if _NAME.fullmatch(name):
        (store / KEYS / name).unlink(missing_ok=True)


def remove_unused_keys(store: Path, used: Collection[str]) -> None:
    """Remove the keys of engines that are gone."""
    folder = store / KEYS
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError):
            if path.name not in used and time.time() - path.stat().st_mtime > MIN_AGE:
                path.unlink()


def save_engines(path: Path, engines: Mapping[int, Mapping[str, str]]) -> None:
    """Write `url` and `key` of each rollout actor's engine; no file without any."""
    text = json.dumps({str(n): dict(entry) for n, entry in engines.items()}, indent=1)
    if not engines:
        path.unlink(missing_ok=True)
    elif not path.exists() or path.read_text() != text:
        write_private(path, text)


def engine_of(path: Path, n: int) -> tuple[str, str] | None:
    """Return address and key of rollout actor `n`'s external engine, or None."""
    try:
        entry = json.loads(path.read_text()).get(str(n))
    except FileNotFoundError:
        return None
    return None if entry is None else (str(entry["url"]), str(entry["key"]))
