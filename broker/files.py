"""Private files, folders and locks, refused where another user could control them."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from broker.errors import UnsafePathError

_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file atomically, with mode 0600; text as UTF-8.

    A process killed here, or a machine that loses power, leaves the old content or the new one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # An earlier process with this pid may have left the file. Unlinking also avoids writing through a planted link.
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def make_private_folder(path: Path) -> None:
    """Create a folder and its parents with mode 0700, or check an existing one.

    The folders above an existing one are not checked: who can write there can rename it. See `check_parents`.

    Raises:
        UnsafePathError: the path is a link, another user owns the folder, or group or others may write to it.
        OSError: it cannot be created.
    """
    for missing in reversed([folder for folder in (path, *path.parents) if not os.path.lexists(folder)]):
        missing.mkdir(mode=0o700, exist_ok=True)
    check_private_folder(path)
    if path.stat().st_mode & 0o777 != 0o700:  # noqa: PLR2004
        path.chmod(0o700)


def check_private_folder(path: Path) -> None:
    """Check that an existing folder is this user's, and that nobody else may write to it.

    Raises:
        UnsafePathError: the path is a link, another user owns the folder, or group or others may write to it.
        FileNotFoundError: there is no such folder.
    """
    if path.is_symlink():
        msg = f"{path} is a link to {os.readlink(path)}; give the path of the folder itself"  # noqa: PTH115
        raise UnsafePathError(msg)
    state = path.stat()
    if not stat.S_ISDIR(state.st_mode):
        msg = f"{path} is not a folder; give another path"
        raise UnsafePathError(msg)
    if state.st_uid != os.geteuid():
        msg = f"{path} belongs to user {state.st_uid}, and this is user {os.geteuid()}; give another path"
        raise UnsafePathError(msg)
    if state.st_mode & _OTHERS_WRITE:
        msg = (
            f"other users may write to {path} (mode {state.st_mode & 0o7777:04o}); if its content is yours: "
            f"chmod 700 {path}"
        )
        raise UnsafePathError(msg)


def check_parents(path: Path) -> None:
    """Check that no other user can replace a folder by another one.

    Every existing folder above it must belong to this user or to root, and only they may write to it; a folder with the
    sticky bit, as /tmp, is safe.

    Raises:
        UnsafePathError: one of the folders above is not safe.
    """
    for parent in dict.fromkeys((*path.absolute().parents, *path.resolve().parents)):
        if not os.path.lexists(parent):
            continue
        state = parent.lstat()
        unsafe = ""
        if state.st_uid not in (_ROOT, os.geteuid()):
            unsafe = f"belongs to user {state.st_uid}"
        elif stat.S_ISDIR(state.st_mode) and state.st_mode & _OTHERS_WRITE and not state.st_mode & stat.S_ISVTX:
            unsafe = f"can be written by other users (mode {state.st_mode & 0o7777:04o})"
        if unsafe:
            msg = f"{path} is not safe: {parent} {unsafe}, who could put another folder in its place"
            raise UnsafePathError(msg)


def open_lock(path: Path) -> int:
    """Open a lock file with mode 0600, created if needed; return its descriptor.

    Raises:
        UnsafePathError: the path is a link or no file, or another user owns the file.
        OSError: it cannot be opened.
    """
    if path.is_symlink():
        msg = f"lock {path} is a link to {os.readlink(path)}; remove the link"  # noqa: PTH115
        raise UnsafePathError(msg)
    # O_NOFOLLOW also refuses a link that was planted since; O_NONBLOCK does not wait for the writer of a planted FIFO.
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    state = os.fstat(lock)
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
        os.close(lock)
        whose = f"belongs to user {state.st_uid}" if stat.S_ISREG(state.st_mode) else "is not a file"
        msg = f"lock {path} {whose}, and this is user {os.geteuid()}; remove it"
        raise UnsafePathError(msg)
    return lock


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files that dead processes left in a folder."""
    for path in folder.glob(".*.tmp"):
        pid = path.name.split(".")[-2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and not path.is_dir():
            path.unlink(missing_ok=True)


def try_lock(lock: int) -> bool:
    """Take a lock file if nobody has it; return whether it was taken."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(lock: int) -> bool:
    """Release a lock file; return True."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True
