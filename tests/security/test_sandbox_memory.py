"""Hostile programs in the sandbox of the tool `run_python` try each way to hold memory beyond their limit."""

from __future__ import annotations

import errno
import os
import platform
import re
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_actors.envs.tools.python import run_code
from relax_actors.isolation import control_group, seccomp
from relax_actors.isolation.sandbox import Ended, Limits
from tests.support.programs import needs_bubblewrap

MIB = 128
LIMITS = Limits(seconds=20.0, cpu_seconds=20, memory_mib=MIB, processes=8)
HEAD = f"""
import ctypes, mmap, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
CALLS = {{**{dict(seccomp.MACHINES["x86_64"].refused)}, "clone": 56, "unshare": 272, "clone3": 435}}
if os.uname().machine == "aarch64":
    CALLS = {{**{dict(seccomp.MACHINES["aarch64"].refused)}, "clone": 220, "unshare": 97, "clone3": 435}}

def call(name, *arguments):
    result = libc.syscall(CALLS[name], *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result

def fill(path):
    with open(path, "wb", 0) as file:
        return file.write(bytes(8 << 20))

def fill_own_tmpfs(uid, gid):
    # Become root of the new namespace, mount a file system without a limit, and return what it took.
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {{uid}} 1"), ("gid_map", f"0 {{gid}} 1")):
        open(f"/proc/self/{{name}}", "w").write(text)
    call("mount", b"none", b"/tmp", b"tmpfs", 0, 0)
    return sum(fill(f"/tmp/{{n}}") for n in range(60))

uid, gid, held = os.getuid(), os.getgid(), 0
def report(*_):
    print("held", held >> 20, flush=True)
"""
TAIL = "\nexcept (OSError, MemoryError) as error:\n    print(repr(error))\nreport()\n"
WAYS = {
    "tmpfs of its own": """
    call("unshare", 0x10000000 | 0x00020000)
    held += fill_own_tmpfs(uid, gid)
""",
    "namespace by clone": """
    if call("clone", 0x10000000 | 0x00020000 | 17, 0, 0, 0, 0) == 0:
        held += fill_own_tmpfs(uid, gid)
        report()
        os._exit(0)
    os.wait()
""",
    "namespace by clone3": """
    arguments = (ctypes.c_uint64 * 11)(0x10000000 | 0x00020000, 0, 0, 0, 17)
    if call("clone3", arguments, 88) == 0:
        held += fill_own_tmpfs(uid, gid)
        report()
        os._exit(0)
    os.wait()
""",
    "memfd": """
    kept = []
    for n in range(50):
        kept.append(call("memfd_create", b"x", 0))
        for _ in range(2): held += os.write(kept[-1], bytes(8 << 20))
""",
    "secret memory": """
    for n in range(50):
        kept = call("memfd_secret", 0)
        os.ftruncate(kept, 8 << 20)
        memory = mmap.mmap(kept, 8 << 20)
        memory[:] = bytes(8 << 20)
        held += 8 << 20
""",
    "shared memory of System V": """
    libc.shmat.restype = ctypes.c_void_p
    for n in range(60):
        at = libc.shmat(call("shmget", 0, 8 << 20, 0o1600), None, 0)
        ctypes.memset(at, 1, 8 << 20)
        libc.shmdt(ctypes.c_void_p(at))
        held += 8 << 20
""",
    "queues of System V": """
    for n in range(20_000):
        queue = call("msgget", 0, 0o1600)
        for _ in range(2):
            if libc.msgsnd(queue, b"1" * 8008, 8000, 0o4000): raise OSError(ctypes.get_errno(), "msgsnd")
            held += 8000
""",
    "shared memory of POSIX": """
    for n in range(60): held += fill(f"/dev/shm/{n}")
""",
    "files in /tmp": """
    for n in range(60): held += fill(f"/tmp/{n}")
""",
    "mapped files in /tmp": """
    for n in range(60):
        with open(f"/tmp/{n}", "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, 8 << 20)
            mmap.mmap(file.fileno(), 8 << 20)[:] = bytes(8 << 20)
        held += 8 << 20
""",
    "pipes": """
    import fcntl
    while True:
        read, write = os.pipe()
        try: fcntl.fcntl(write, 1031, 1 << 20)
        except OSError: pass
        os.set_blocking(write, False)
        try:
            while True: held += os.write(write, bytes(65536))
        except BlockingIOError: pass
""",
    "pages of a process in pipes": """
    while True:
        read, write = os.pipe()
        memory = mmap.mmap(-1, 1 << 20)
        memory[:] = bytes(1 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for page in range(16):
            call("vmsplice", write, (ctypes.c_uint64 * 2)(address + page * 65536, 1), 1, 0)
        held += 1 << 20
""",
    "connections": """
    server = socket.create_server(("127.0.0.1", 0))
    while True:
        pair = socket.create_connection(server.getsockname()), server.accept()[0]
        for end in pair * 20:
            end.setblocking(False)
            try:
                while True: held += end.send(bytes(1 << 20))
            except BlockingIOError: pass
            try:
                while end in pair[1:]: held -= len(end.recv(1 << 20))
            except BlockingIOError: pass
        globals().setdefault("kept", []).append(pair)
""",
    "io_uring": """
    held += call("io_uring_setup", 4096, (ctypes.c_uint64 * 16)()) << 30
""",
}
"""Body of a program that adds to `held` the bytes that it holds."""
REFUSED = {
    "tmpfs of its own": errno.EPERM,
    "namespace by clone": errno.EPERM,
    "namespace by clone3": errno.ENOSYS,
    "memfd": errno.EPERM,
    "secret memory": errno.EPERM,
    "shared memory of System V": errno.EPERM,
    "queues of System V": errno.EPERM,
    "pages of a process in pipes": errno.EPERM,
    "connections": errno.EPERM,
    "io_uring": errno.EPERM,
    "shared memory of POSIX": errno.EROFS,
}
PROCESSES = """
import os, time
for n in range(3):
    if os.fork() == 0:
        x = b"x" * (64 << 20)
        time.sleep(2)
        print("one", flush=True)
        os._exit(0)
for n in range(3): os.wait()
"""


@pytest.fixture(params=["control group", "no control group"])
def is_bounded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    control_group.bounds_memory.cache_clear()
    if request.param == "no control group":
        monkeypatch.setattr(control_group, "parents", lambda _: [])
    elif not control_group.bounds_memory():
        pytest.skip(f"needs a control group with a limit of memory: {control_group.problem('memory')}")
    yield request.param == "control group"
    control_group.bounds_memory.cache_clear()


def run(code: str) -> Ended:
    return run_code(code, LIMITS, "bubblewrap", "")


def held(way: str) -> tuple[int, Ended]:
    ended = run(f"{HEAD}\ntry:{WAYS[way]}{TAIL}")
    numbers = [int(n) for n in re.findall(r"held (\d+)", ended.output)]
    assert numbers or ended.problem, ended
    return max(numbers, default=0), ended


@needs_bubblewrap
@pytest.mark.parametrize("way", WAYS)
def test_program_holds_no_more_than_its_limit(way: str, is_bounded: bool) -> None:  # noqa: FBT001
    mib, ended = held(way)
    assert mib <= MIB
    if way in REFUSED:
        assert mib == 0
        assert f"Error({REFUSED[way]}, " in ended.output, ended
    elif not is_bounded:
        assert mib > 0, ended


@needs_bubblewrap
def test_memory_of_all_processes_and_files_is_bounded_together(is_bounded: bool) -> None:  # noqa: FBT001
    """Without a control group each process has the limit of its own; with it the kernel kills one of the three."""
    ended = run(PROCESSES)
    if is_bounded:
        assert ended.problem == f"it used more than {MIB} MiB of memory" or ended.output.count("one") < 3, ended
    else:
        assert ended == Ended("one\n" * 3)


@needs_bubblewrap
def test_limits_leave_nothing_behind(is_bounded: bool) -> None:  # noqa: FBT001
    run("print(1)")
    left = [path for parent in control_group.parents("memory") for path in parent.glob(f"relax-{os.getpid()}.*")]
    assert left == []


def test_groups_of_dead_processes_are_removed_and_those_of_living_ones_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder stands for a control group: it can be removed only if nothing is in it, too."""
    dead = os.fork() or os._exit(0)
    os.waitpid(dead, 0)
    for name in (f"relax-{dead}.1", f"relax-{os.getpid()}.1", "relax-0123456789abcdef", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(control_group, "parents", lambda _: [tmp_path])
    control_group.remove_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"relax-{os.getpid()}.1", "relax-0123456789abcdef", "other"]
    )


@needs_bubblewrap
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have one architecture")
def test_calls_of_another_architecture_kill_the_program() -> None:
    x32 = "import ctypes; print(ctypes.CDLL(None).syscall(0x40000000 + 319, b'x', 0))"
    assert run(x32) == Ended("", f"it was killed by {signal.SIGSYS.name}")
    # int 0x80 with number 356, memfd_create of i386.
    code = struct.pack("<BI", 0xB8, 356) + b"\x31\xdb\x31\xc9\xcd\x80\xc3"
    i386 = f"import ctypes, mmap; m = mmap.mmap(-1, 4096, prot=7); m.write({code!r}); "
    i386 += "print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))())"
    assert run(i386) == Ended("", f"it was killed by {signal.SIGSYS.name}")


@needs_bubblewrap
def test_honest_programs_run() -> None:
    code = (
        "import asyncio; asyncio.run(asyncio.sleep(0))\n"
        "import concurrent.futures, subprocess, tempfile, threading\n"
        "with concurrent.futures.ThreadPoolExecutor(2) as pool: print(sum(pool.map(abs, range(5))))\n"
        "print(subprocess.run(['echo', 'shell'], capture_output=True, text=True).stdout.strip())\n"
        "with tempfile.TemporaryFile() as file: print(file.write(bytes(1000)))\n"
    )
    assert run(code) == Ended("10\nshell\n1000\n")


@pytest.mark.parametrize("name", seccomp.MACHINES)
def test_filter_decides_by_architecture_number_and_flags(name: str) -> None:
    machine = seccomp.MACHINES[name]

    def action(
        number: int, flags: int = 0, architecture: int = machine.architecture, families: tuple[int, ...] = (1, 2)
    ) -> int:
        return interpret(seccomp.program(machine, families), struct.pack("<IIQQ", number, architecture, 0, flags))

    refused = seccomp.REFUSE | errno.EPERM
    assert {action(number) for number in machine.refused.values()} == {refused}
    assert action(435) == seccomp.REFUSE | errno.ENOSYS
    threads = 0x003D0F00
    for number in (machine.clone, machine.unshare):
        assert action(number, threads) == seccomp.ALLOW
        for flag in (0x20000, *(1 << bit for bit in range(25, 31))):
            assert action(number, threads | flag) == refused
    for families in ((1,), (1, 2), (1, 2, 10, 16)):
        allowed = {n for n in range(50) if action(machine.socket, n, families=families) == seccomp.ALLOW}
        assert allowed == set(families)
        assert action(machine.socket, 49, families=families) == refused
    assert action(0, 0x10000000) == seccomp.ALLOW
    assert action(0, architecture=0x40000003) == seccomp.KILL_PROCESS
    assert action(0x40000000) == (seccomp.ALLOW if machine.foreign is None else seccomp.KILL_PROCESS)


def interpret(program: bytes, data: bytes) -> int:
    """Run a filter as the kernel does."""
    at, value = 0, 0
    instructions = list(struct.iter_unpack("=HBBI", program))
    while True:
        code, yes, no, operand = instructions[at]
        at += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}
            at += yes if holds[code] else no
