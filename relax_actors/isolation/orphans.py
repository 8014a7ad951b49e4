"""Processes whose parent has ended, adopted and ended by a subreaper.

Invariant: a child of `broker.process.spawn` is a subreaper. All its descendants stay below it while it lives, also
those that made a session of their own and gave up their parent, and come to the process above it when it ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from relax_actors.isolation import proc

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 1, 36, 37
END_SECONDS = 5.0
"""Time for killed processes to end; only a process that hangs in the kernel needs more."""
MANY_ZOMBIES = 256


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, or end it now."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Adopt the descendants of this process whose parent ends, until this process ends."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_subreaper() -> bool:
    """Whether this process adopts descendants."""
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    return bool(value.value)


def kill_orphans(known: Collection[int], spared: Callable[[int], bool] = lambda _: False) -> list[int]:
    """Kill the processes that this process has adopted, and their descendants; return their ids.

    Call it after a child has ended. Does nothing in a process that is no subreaper. `known` are its own children that
    lead a session; those in its own session are never killed, nor adopted processes that are `spared`.
    """
    killed: set[int] = set()
    end = time.monotonic() + END_SECONDS
    session = os.getsid(0)
    while is_subreaper() and time.monotonic() < end:
        # A killed process hands its children to this one, so look again until there are none.
        adopted = [pid for pid, child in proc.children().items() if child.session != session and pid not in known]
        orphans = [pid for pid in adopted if not spared(pid)]
        if not orphans:
            break
        killed.update(orphans)
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)
    return sorted(killed)


class ZombieReaper:
    """Collects exit codes of adopted processes beside children of its own.

    A zombie child of code that waits later looks the same. So nothing is collected unless there are very many that
    nobody has waited for since the last call.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def reap(self) -> None:
        """Collect abandoned zombies; call it about once a minute."""
        with suppress(ChildProcessError):
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                self._seen = set()
                return
            zombies = {pid for pid, child in proc.children().items() if child.state == "Z"}
            abandoned = zombies & self._seen
            if len(abandoned) > MANY_ZOMBIES:
                for pid in abandoned:
                    os.waitpid(pid, os.WNOHANG)
            self._seen = zombies - abandoned if len(abandoned) > MANY_ZOMBIES else zombies
