"""Janitor of an inference server: kills its process group when its keeper ends, and removes leftover shared memory.

The keeper is the process of `inference_server.py`. The janitor runs as a script, in its own session, so that whatever
ends the keeper does not end it: `python -I -S janitor.py <descriptor> <group> <folder> <beginning of a segment's
name>...`. The descriptor is the read end of a pipe whose only write end is the keeper's.
"""

import os
import select
import shutil
import signal
import sys
import time

SCAN_SECONDS, MAX_SCAN_SECONDS = 0.25, 1.0
"""Seconds between two scans, at first and later. Segments created and leaked between two scans are missed."""
END_SECONDS = 10.0
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 where shared memory lies


def members(group: int) -> list[int]:
    """List the live processes of a group."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(name))
    return found


def is_janitor(pid: int) -> bool:
    """Whether a process is a janitor, which outlives the process that started it."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0")[1:4] == [b"-I", b"-S", __file__.encode()]
    except OSError:
        return False


def segments(group: int, beginnings: tuple[str, ...]) -> set[str]:
    """Find the shared-memory segments that a group's processes use, by the beginnings of their names."""
    kept = {entry.inode(): entry.path for entry in os.scandir(SHARED_MEMORY) if entry.name.startswith(beginnings)}
    found = set()
    for pid in members(group):
        try:
            open_files = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
            with open(f"/proc/{pid}/maps") as file:
                # A semaphore is mapped under a name that no longer exists, so compare inode numbers.
                mapped = [kept.get(int(line.split(None, 5)[4])) for line in file if SHARED_MEMORY in line]
        except OSError:
            continue
        used = {*open_files, *mapped}
        found |= {path for path in kept.values() if path in used}
    return found


def main() -> None:
    """Wait for the keeper's end, then clean up."""
    pipe, group, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    beginnings = tuple(sys.argv[4:])
    left, pause = set(), SCAN_SECONDS
    while not select.select([pipe], [], [], pause)[0]:
        left |= segments(group, beginnings)
        pause = min(MAX_SCAN_SECONDS, 1.1 * pause)
    left |= segments(group, beginnings)
    end = time.monotonic() + END_SECONDS
    while members(group) and time.monotonic() < end:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            break
        time.sleep(0.01)
    for path in left:
        try:
            os.unlink(path)
        except OSError:
            continue
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
