"""Whether the embedded broker works: it answers, its JetStream serves, and it can write."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from broker.address import Address
from broker.server import Server, is_jetstream_ready
from relax_actors.supervision.outcome import Verdict
from relax_actors.supervision.spec import Blame

# After a write that failed, as on a full disk, the server answers no more writes to that stream until it is restarted.
_CANNOT_WRITE = b"critical write error"
ROOM = 16 << 20
ASK_SECONDS = 1.5
"""From one question that is not answered to the next, at most."""


class BrokerHealth:
    """Examines one life of the server; make it just before the start.

    Args:
        server: the server.
        address: where it listens.
        heartbeat: seconds without an answer after which it is taken for hung.
        patience: seconds that a full disk is waited for.
        say: told what is waited for; an empty text when it is over.
    """

    def __init__(
        self, server: Server, address: Address, heartbeat: float, patience: float, say: Callable[[str], None]
    ) -> None:
        self._server, self._address, self._say = server, address, say
        self._heartbeat, self._patience = heartbeat, patience
        self._read = server.log.stat().st_size if server.log.exists() else 0
        self._answered: float | None = None
        self._unanswered = 0
        self._broken_since: float | None = None

    def __call__(self) -> Verdict | None:
        """Why the server must be killed now, if it must."""
        now = time.monotonic()
        if self._answered is None or is_jetstream_ready(self._address):
            self._answered, self._unanswered = now, 0
        else:
            self._unanswered += 1
        silent = now - self._answered
        # Time alone says nothing: it goes on while the whole machine stands still, and nobody can ask or answer.
        if silent > self._heartbeat and self._unanswered >= max(2.0, self._heartbeat / ASK_SECONDS):
            return Verdict(f"no answer for {silent:.1f} s (supervision.heartbeat)", blame=Blame.NOBODY)
        if self._broken_since is None and self._cannot_write():
            self._broken_since = now
        return None if self._broken_since is None else self._wait_for_room(now - self._broken_since)

    def _wait_for_room(self, waited: float) -> Verdict | None:
        folder = self._server.folder
        free = shutil.disk_usage(folder).free
        if free >= ROOM:
            self._say("")
            return Verdict("it could not write, and must be started again to go on", blame=Blame.NOBODY)
        text = f"the broker cannot write: {folder} has {free >> 20} MiB free; free space"
        if waited > self._patience:
            return Verdict(f"{text}, then start the run again (waited {waited:.0f} s, store.patience)", final=True)
        self._say(f"{text} (waited {waited:.0f} s)")
        return None

    def _cannot_write(self) -> bool:
        path = self._server.log
        with suppress(OSError):
            data = b""
            if path.stat().st_size < self._read:
                # It was begun anew: what came last lies in the one before.
                with suppress(OSError):
                    data = _after(path.with_name(f"{path.name}.1"), self._read)
                self._read = 0
            new = _after(path, self._read)
            # A line may come in two parts.
            self._read += max(0, len(new) - len(_CANNOT_WRITE))
            return _CANNOT_WRITE in (data + new).lower()
        return False


def _after(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()
