"""Code that a model wrote can do nothing but compute: hostile programs, run for real."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from relax_actors.envs.tools.python import PythonEnvironment, run_code
from relax_actors.errors import ConfigError
from relax_actors.isolation import control_group, sandbox
from relax_actors.isolation.orphans import become_subreaper
from relax_actors.isolation.sandbox import Ended, Kind, Limits, check_bubblewrap
from tests.support.containers import IMAGE, containers, needs_engine
from tests.support.messages import assert_says
from tests.support.programs import needs_bubblewrap, needs_programs
from tests.support.running import wait_until

LIMITS = Limits(seconds=5.0, memory_mib=256, processes=16, output=10_000)


def run(kind: Kind, code: str, limits: Limits = LIMITS) -> Ended:
    return run_code(code, limits, kind, IMAGE)


@pytest.fixture(
    params=[pytest.param("bubblewrap", marks=needs_bubblewrap), pytest.param("container", marks=needs_engine)]
)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def test_program_prints_its_result(kind: Kind) -> None:
    assert run(kind, "import json; print(json.dumps(sum(range(10))))") == Ended("45\n")


def test_error_is_shown_with_its_line(kind: Kind) -> None:
    ended = run(kind, "x = 1\nx / 0")
    assert ended.output.endswith("ZeroDivisionError: division by zero\n")
    assert "line 2" in ended.output
    assert ended.problem == "it ended with exit code 1"


FORKS = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(100)
        n += 1
except OSError as error:
    print(n < 16, error.errno, flush=True)
"""
WRITES = """
for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/proc/x"):
    try:
        open(path, "w")
        print("wrote", path)
    except OSError as error:
        print(error.errno)
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(100)
    os._exit(0)
print("left")
"""
PROCESSES = "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]), os.getuid() != 0)"
PRIVILEGES = """
lines = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print([int(lines[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "NoNewPrivs")])
"""
TIMEOUT, FAILED = "it took longer than 1 seconds and was stopped", "it ended with exit code 1"
HOSTILE: dict[str, tuple[str, str, str]] = {
    "endless loop": ("while True: pass", "", rf"{TIMEOUT}|it used more than 1 seconds of CPU|it was killed by SIGKILL"),
    "sleep": ("import time; time.sleep(100)", "", TIMEOUT),
    "memory": ("x = bytearray(1 << 31)", "MemoryError", FAILED),
    "fork bomb": (FORKS, "True 11", rf"{TIMEOUT}|"),
    "output": ("while True: print('x' * 1000)", "xxxx", "it wrote more than 10000 bytes and was stopped"),
    "files": (WRITES, "30\n30\n30\n", ""),
    "large file": ("open('/tmp/x', 'wb').write(bytes(32 << 20))", "", rf"it was killed by SIGXFSZ|{FAILED}"),
    "daemon": (DAEMON, "left", rf"{TIMEOUT}|"),
    "other processes": (PROCESSES, "2 True", ""),
    "privileges": (PRIVILEGES, "[0, 0, 0, 1]", ""),
    "environment": ("import os; print(sorted(os.environ))", "['HOME', 'LANG', 'PATH', 'PWD']", ""),
}
"""Program, what it prints, and a pattern of why it ends."""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_is_stopped(kind: Kind, name: str) -> None:
    code, output, problem = HOSTILE[name]
    began = time.monotonic()
    ended = run(kind, code, Limits(seconds=1.0, memory_mib=256, processes=16, output=10_000))
    assert time.monotonic() - began < 20
    assert output in ended.output, ended
    assert re.fullmatch(problem, ended.problem), ended
    assert len(ended.output) <= 10_000
    assert "wrote" not in ended.output
    assert not _sleepers(), "a process outlived its sandbox"
    if kind == "container":
        wait_until(lambda: not containers(), "end of the container")


def _sleepers() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            program = Path(path.read_bytes().split(b"\0")[0].decode())
            found += [str(path)] if program.name == "bwrap" and _is_child(path.parent) else []
    return found


def _is_child(process: Path) -> bool:
    return f"PPid:\t{os.getpid()}\n" in (process / "status").read_text()


def test_program_reaches_no_network(kind: Kind) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = run(
            kind,
            "import socket\n"
            f"for host in ('127.0.0.1', 'localhost', '10.0.0.1'):\n"
            f" try: socket.create_connection((host, {port}), 1); print('connected')\n"
            " except OSError as e: print(type(e).__name__)",
        )
    assert "connected" not in ended.output
    assert ended.output.startswith("PermissionError" if kind == "bubblewrap" else "ConnectionRefusedError")


def test_program_sees_no_file_of_this_user(kind: Kind, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    paths = [str(secret), str(Path.home() / ".profile")]
    ended = run(kind, f"import os; print([os.access(path, os.R_OK) for path in {paths!r}])")
    assert ended.output == "[False, False]\n"


def test_missing_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        check_bubblewrap()
    assert_says(error.value, 'environment.options.sandbox = "bubblewrap"', "apt install bubblewrap", '"none"')


def in_child(holds: Callable[[], bool]) -> bool:
    """Return what a function returns in a forked process."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            code = 0 if holds() else 2
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


@needs_bubblewrap
def test_calls_of_a_session_leave_room_for_the_next() -> None:
    """A session adopts what its calls leave behind, which does not count against their limit of processes."""

    def many_calls() -> bool:
        become_subreaper()
        return all(run("bubblewrap", "print(1)").output == "1\n" for _ in range(LIMITS.processes))

    assert in_child(many_calls)


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_other_processes_of_the_same_user_do_not_count() -> None:
    def crowded() -> bool:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        control_group.bounds_memory.cache_clear()
        others = [subprocess.Popen(["/bin/sleep", "100"]) for _ in range(2 * LIMITS.processes)]
        try:
            return run("bubblewrap", FORKS).output == "True 11\n"
        finally:
            for other in others:
                other.kill()

    assert in_child(crowded)


@needs_bubblewrap
def test_bubblewrap_need_not_be_in_a_folder_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its folder is on the PATH of the actor, not on that of the sandboxed program."""
    for name in ("bwrap", "setpriv", "prlimit"):
        shutil.copy(shutil.which(name) or "", tmp_path / name)
    monkeypatch.setenv("PATH", str(tmp_path))
    check_bubblewrap()
    shown = run("bubblewrap", "print(open('/proc/1/cmdline').read().split(chr(0))[0])")
    assert shown == Ended(f"{tmp_path}/bwrap\n")


@needs_bubblewrap
def test_python_that_does_not_run_in_the_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is not the system's is shown with its folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\necho broken installation\nexit 1\n")
    (tmp_path / "bin" / "python3").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python3"))
    monkeypatch.setattr(sandbox, "SYSTEM_PATH", "/nowhere")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/bin/python3 does not run in the sandbox.*apt install python3"):
        check_bubblewrap()


@needs_programs("util-linux", "setpriv")
def test_too_old_bubblewrap_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=r"bubblewrap 0\.6; install 0\.8 or newer.*PATH"):
        check_bubblewrap()


@needs_programs("util-linux", "prlimit")
def test_limits_hold_without_a_sandbox() -> None:
    assert run("none", "print(6 * 7)") == Ended("42\n")
    assert run("none", "x = bytearray(1 << 31)").output.endswith("MemoryError\n")


def test_tool_answers_with_the_output() -> None:
    (schema,) = PythonEnvironment.tool_schemas({})
    assert schema["function"]["name"] == "run_python"
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "code": {
                "type": "string",
                "description": "the program; it has the standard library, no network and no files.",
            }
        },
        "required": ["code"],
    }
