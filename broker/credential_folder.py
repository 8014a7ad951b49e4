"""Folder that `relax keys` writes to: private to its user, and never one that holds something else."""

from __future__ import annotations

import os
from pathlib import Path

from broker.address import CREDENTIALS_FILE
from broker.credentials import read_claims
from broker.errors import ConfigError, UnsafePathError
from broker.files import make_private_folder

ROOT_USER = 0


def prepare_folders(folder: Path, users: list[str], run: str, *, has_server: bool, replace_run: bool) -> str:
    """Create the folder and its subfolders with mode 0700, and return the run whose credentials are replaced, if any.

    `has_server` says that the folder holds the files of the server, too, and `replace_run` that it may be another
    run's.

    Raises:
        ConfigError: the folder has other content, belongs to another user or another run, or cannot be written.
    """
    subfolders = [*(("private", "server") if has_server else ()), *users]
    path, replaced = folder, ""
    try:
        if folder.exists():
            _check_content(folder, subfolders)
            if has_server and not replace_run:
                _check_signing_keys(folder)
            replaced = _other_run(folder, run)
            if replaced and not replace_run:
                beside = f", with --server {folder} for a second run on its server" if has_server else ""
                msg = (
                    f"{folder} holds the credentials of run {replaced!r}, which would lose them; give another folder"
                    f"{beside}, or --replace if that run is over"
                )
                raise ConfigError(msg)
        for path in (folder, *(folder / name for name in subfolders)):
            if not (path == folder and _belongs_to_root(path)):
                make_private_folder(path)
    except UnsafePathError as error:
        msg = f"credentials cannot be written: {error}"
        raise ConfigError(msg) from error
    except OSError as error:
        msg = (
            f"credentials cannot be written to {path}: {error.strerror}; give a folder that user {os.geteuid()} owns "
            "(in a container: mount a volume there)"
        )
        raise ConfigError(msg) from error
    return replaced


def _belongs_to_root(folder: Path) -> bool:
    """Whether root owns the top folder, as in a container where volumes are mounted below it."""
    return folder.is_dir() and folder.stat().st_uid == ROOT_USER != os.geteuid()


def _check_content(folder: Path, subfolders: list[str]) -> None:
    if not folder.is_dir():
        msg = f"{folder} is not a folder; give another path"
        raise ConfigError(msg)
    if (folder / "private" / "keys.json").exists():
        return
    others = (path for path in folder.iterdir() if path.name not in subfolders)
    if other := sorted(path.name for path in others if not (_is_ignored(path) or (path / CREDENTIALS_FILE).exists())):
        msg = f"{folder} was not written by `relax keys`: it holds {', '.join(other[:3])}; give a new or empty folder"
        raise ConfigError(msg)


def _check_signing_keys(folder: Path) -> None:
    """Refuse to replace credentials that a server knows by ones that it does not know."""
    keys = folder / "private" / "keys.json"
    if not keys.exists() and any(folder.glob(f"*/{CREDENTIALS_FILE}")):
        msg = (
            f"{folder} holds credentials, but {keys}, which signs them, is missing: name the folder of their server "
            "with --server, restore that file, or give --replace if their run is over"
        )
        raise ConfigError(msg)


def _is_ignored(path: Path) -> bool:
    """Whether a path is nothing of anybody: hidden, or an empty folder, as the volume of a role that the run lacks."""
    return path.name.startswith(".") or path.name == "lost+found" or (path.is_dir() and not any(path.iterdir()))


def _other_run(folder: Path, run: str) -> str:
    """Name another run whose credentials the folder holds; empty if there is none."""
    names = [read_claims(path).name.partition(".")[0] for path in sorted(folder.glob(f"*/{CREDENTIALS_FILE}"))]
    return next((name for name in names if name != run), "")
