"""Filter of system calls for bubblewrap's sandboxes, as a BPF program.

It refuses calls that hold memory outside the limits of a process and of /tmp, and calls that reach parts of the kernel
that namespaces do not isolate. Programs for another architecture of the same machine, whose calls have other numbers,
are killed. The filter is classic BPF and small enough to write without libseccomp.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

# Codes of <linux/bpf_common.h> and actions of <linux/seccomp.h>.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL_PROCESS, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
# Offsets in struct seccomp_data: number, architecture, first argument (its low half, on a little-endian machine).
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
UNIX = (socket.AF_UNIX,)
LOOPBACK = (*UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""A sandbox with a loopback interface; the C library asks for addresses by netlink."""
_CLONE3 = 435

_EVERYWHERE = MappingProxyType(
    {
        # io_uring performs calls that no filter sees, and its buffers belong to no process.
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "io_uring_register": 427,
        # Mounts: a tmpfs of any size.
        "open_tree": 428,
        "move_mount": 429,
        "fsopen": 430,
        "fsconfig": 431,
        "fsmount": 432,
        "fspick": 433,
        "mount_setattr": 442,
        # Memory that only a descriptor holds.
        "memfd_secret": 447,
    }
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Numbers of system calls of one kind of machine.

    Attributes:
        architecture: its constant of <linux/audit.h>.
        foreign: first number of another architecture with the same constant (x32); None if there is none.
        clone: number of clone.
        unshare: number of unshare.
        socket: number of socket.
        refused: calls that are refused whatever their arguments, by name.
    """

    architecture: int
    foreign: int | None
    clone: int
    unshare: int
    socket: int
    refused: Mapping[str, int]


MACHINES = {
    "x86_64": Machine(
        0xC000003E,
        0x40000000,
        clone=56,
        unshare=272,
        socket=41,
        refused=MappingProxyType(
            {
                # Memory that is held without being mapped: shared memory and queues of System V and POSIX, pages of a
                # process that a pipe keeps.
                "shmget": 29,
                "semget": 64,
                "msgget": 68,
                "mq_open": 240,
                "memfd_create": 319,
                "vmsplice": 278,
                # Namespaces and mounts.
                "setns": 308,
                "pivot_root": 155,
                "mount": 165,
                "umount2": 166,
                # Parts of the kernel that are the same in every namespace.
                "syslog": 103,
                "add_key": 248,
                "request_key": 249,
                "keyctl": 250,
                "perf_event_open": 298,
                "bpf": 321,
                "userfaultfd": 323,
                **_EVERYWHERE,
            }
        ),
    ),
    "aarch64": Machine(
        0xC00000B7,
        None,
        clone=220,
        unshare=97,
        socket=198,
        refused=MappingProxyType(
            {
                "shmget": 194,
                "semget": 190,
                "msgget": 186,
                "mq_open": 180,
                "memfd_create": 279,
                "vmsplice": 75,
                "setns": 268,
                "pivot_root": 41,
                "mount": 40,
                "umount2": 39,
                "syslog": 116,
                "add_key": 217,
                "request_key": 218,
                "keyctl": 219,
                "perf_event_open": 241,
                "bpf": 280,
                "userfaultfd": 282,
                **_EVERYWHERE,
            }
        ),
    ),
}


def this_machine() -> Machine | None:
    """Return the numbers of this machine's system calls; None if they are not known."""
    return MACHINES.get(platform.machine())


def program(machine: Machine, families: Sequence[int] = LOOPBACK) -> bytes:
    """Return the filter as an array of struct sock_filter.

    Args:
        machine: the machine's system calls.
        families: address families of which sockets can be made.
    """
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(machine, families))


def _instructions(machine: Machine, families: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield code, skips if the test holds or not, and operand."""
    refuse = (_RETURN, 0, 0, REFUSE | errno.EPERM)
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _EQUAL, 1, 0, machine.architecture
    yield _RETURN, 0, 0, KILL_PROCESS
    yield _LOAD, 0, 0, _NUMBER
    if machine.foreign is not None:
        yield _AT_LEAST, 0, 1, machine.foreign
        yield _RETURN, 0, 0, KILL_PROCESS
    for number in machine.refused.values():
        yield _EQUAL, 0, 1, number
        yield refuse
    # The flags of clone3 are in memory, where a filter cannot look. The C library then falls back on clone.
    yield _EQUAL, 0, 1, _CLONE3
    yield _RETURN, 0, 0, REFUSE | errno.ENOSYS
    yield _EQUAL, 0, len(families) + 3, machine.socket
    yield _LOAD, 0, 0, _FIRST_ARGUMENT
    for left, family in zip(reversed(range(len(families))), families, strict=True):
        yield _EQUAL, left + 1, 0, family
    yield refuse
    yield _RETURN, 0, 0, ALLOW
    # Threads and processes are made by clone, too; only new namespaces are refused.
    yield _EQUAL, 1, 0, machine.clone
    yield _EQUAL, 0, 3, machine.unshare
    yield _LOAD, 0, 0, _FIRST_ARGUMENT
    yield _ANY_BIT, 0, 1, NEW_NAMESPACES
    yield refuse
    yield _RETURN, 0, 0, ALLOW
