"""Run code that a model wrote in a container of Docker or Podman.

A container has no network, a read-only image, an empty /tmp, no capabilities, and a user without a name. Its
process 1 is ours (`container_init.py`) and ends with the wall clock and with the death of the process that called: the
engine then removes the container. A container that was created and never started is removed by its label, at the next
start and at the end of the actor.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from broker.process import kill_group
from relax_actors.config import Config
from relax_actors.envs.observation import EnvironmentFaultError
from relax_actors.errors import ConfigError
from relax_actors.isolation.sandbox import Ended, Limits, communicate, describe, limits_of, timeout_text

OWNER = "RELAX_CONTAINER_OWNER"
"""Environment variable with the labels of an actor's containers, as JSON. `relax.actor` names one actor of one run."""
START_SECONDS = 60.0
"""Time for the engine to create and remove a container, beyond the program's own."""
FIRST_USER, USERS = 20_000, 40_000
"""Range of user ids, within that of a rootless engine. Each caller has its own: processes are limited by user."""
ENGINES = ("docker", "podman")
MIN_ADDRESS_SPACE_MIB = 1536
"""What the command line of an engine, a Go program, needs."""
_INIT = Path(__file__).with_name("container_init.py")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_TMP = "/tmp"  # noqa: S108 the container's own


def run_in_container(command: Sequence[str], text: str, limits: Limits, image: str) -> Ended:
    """Run a program of an image, with a text as its standard input, and return how it ended.

    The engine must have the image, which contains python3.

    Raises:
        EnvironmentFaultError: the engine failed.
    """
    name = f"relax-{secrets.token_hex(8)}"
    data = text.encode(errors="replace")
    patience = replace(limits, seconds=limits.seconds + START_SECONDS)
    with subprocess.Popen(  # noqa: S603 running code is what this is for
        [*_run(name, limits, image), *_process_1(command, limits)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        code = None
        try:
            output, stopped = communicate(process, b"%d\n%b" % (len(data), data), patience, keep_input=True)
            code = process.poll()
        finally:
            kill_group(process.pid)
            if code is None:
                _engine_call("rm", "--force", name)
        assert process.stderr is not None  # noqa: S101 as given to Popen
        said = process.stderr.read().decode(errors="replace")
    if stopped and len(output) < limits.output:
        msg = f"{_engine()} has not run a container of {image} within {patience.seconds:g} seconds; is it overloaded?"
        raise EnvironmentFaultError(msg)
    return Ended(output.decode(errors="replace"), stopped or _end(code or 0, said, limits, image))


def check_container(image: str, where: str = "environment.options") -> None:
    """Check that an engine runs a program in the image; raises ConfigError."""
    if why := _problem(image, where):
        msg = f'{where}.sandbox = "container": {why}'
        raise ConfigError(msg)


def _problem(image: str, where: str) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < MIN_ADDRESS_SPACE_MIB << 20:
        return (
            f"the engine's command needs {MIN_ADDRESS_SPACE_MIB} MiB of address space, the limit is {soft >> 20} MiB; "
            f"set environment.memory_limit_mib to {MIN_ADDRESS_SPACE_MIB} or more"
        )
    if (engine := _engine()) is None:
        return (
            "no container engine answers `docker info` or `podman info`; start Docker or Podman and let this user "
            f'reach it, or write {where}.sandbox = "bubblewrap"'
        )
    answer = _engine_call("image", "inspect", "--format", "{{json .Config.Volumes}}", image)
    if answer.returncode:
        return (
            f"{engine} has no image {image!r}; run `{engine} pull {image}` on each machine that runs environments, or "
            f"name another with {where}.image"
        )
    if volumes := json.loads(answer.stdout):
        return (
            f"image {image!r} declares VOLUME {', '.join(volumes)}, which is writable without a limit of size; name "
            f"an image without volumes with {where}.image"
        )
    try:
        ended = run_in_container(("python3", "-c", "print(1)"), "", Limits(), image)
    except EnvironmentFaultError as error:
        return f"{error}; the image must contain python3, and the engine must support all limits"
    remedy = f"name an image with Python 3.9 or newer with {where}.image"
    return "" if ended.output == "1\n" else f"python3 of image {image!r} does not run ({ended.problem}); {remedy}"


def owner_labels(config: Config, role: str, n: int) -> str:
    """Return the value of the environment variable for an actor.

    Runs of the same name in other folders, or on other machines that share the engine, have other labels.
    """
    actor = f"{socket.gethostname()}:{config.folder.resolve()}:{role}.{n}"
    return json.dumps({"relax.run": config.run.name, "relax.actor": actor})


def remove_leftovers() -> None:
    """Remove the containers that earlier processes of this actor have left behind."""
    if OWNER not in os.environ or _engine() is None:
        return
    answer = _engine_call("ps", "--all", "--quiet", "--filter", f"label=relax.actor={_labels()['relax.actor']}")
    if answer.returncode == 0 and (names := answer.stdout.split()):
        _engine_call("rm", "--force", *names)


@functools.cache
def _engine() -> str | None:
    """Return the engine that answers; sessions inherit it from the process that checked."""
    return next((name for name in ENGINES if shutil.which(name) and _call(name, "info").returncode == 0), None)


def _engine_call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _call(_engine() or ENGINES[0], *arguments)


def _call(engine: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [engine, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_SECONDS)  # noqa: S603
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {START_SECONDS:g} seconds")


def _labels() -> dict[str, str]:
    labels: dict[str, str] = json.loads(os.environ.get(OWNER, "{}"))
    return labels


def _run(name: str, limits: Limits, image: str) -> list[str]:
    """Return the command that creates a container, up to the arguments of python3."""
    user, memory = FIRST_USER + os.getpid() % USERS, f"{limits.memory_mib}m"
    options = {
        "name": name,
        "pull": "never",
        "network": "none",
        "ipc": "none",
        "log-driver": "none",
        "cap-drop": "ALL",
        "security-opt": "no-new-privileges",
        "user": f"{user}:{user}",
        "tmpfs": f"{_TMP}:rw,nosuid,nodev,size={memory},mode=1777",
        "workdir": _TMP,
        "memory": memory,
        "memory-swap": memory,
        "pids-limit": str(limits.processes + 16),  # the engine's own threads count while the container starts
        "entrypoint": "python3",
    }
    labels = [f"--label={key}={value}" for key, value in _labels().items()]
    flags = ["--rm", "--interactive", "--read-only", *(f"--{key}={value}" for key, value in options.items()), *labels]
    return [_engine() or ENGINES[0], "run", *flags, image]


def _process_1(command: Sequence[str], limits: Limits) -> list[str]:
    names = {"as": "AS", "cpu": "CPU", "fsize": "FSIZE", "nproc": "NPROC", "nofile": "NOFILE", "core": "CORE"}
    given: dict[str, Any] = {
        "seconds": limits.seconds,
        "limits": {f"RLIMIT_{names[key]}": value for key, value in limits_of(limits).items()},
        "command": list(command),
        "environment": {"PATH": _PATH, "HOME": _TMP, "LANG": "C.UTF-8", "PWD": _TMP},
    }
    return ["-I", "-S", "-c", _INIT.read_text(), json.dumps(given)]


def _end(code: int, said: str, limits: Limits, image: str) -> str:
    """Describe the end of a program by the report of process 1, or of a kill from outside."""
    try:
        reported = json.loads(said)["code"]
    except (ValueError, TypeError, KeyError):
        if code == 128 + signal.SIGKILL:
            return describe(-signal.SIGKILL, limits)
        msg = f"{_engine()} run {image} failed with exit code {code}: {said.strip()[-500:] or 'no message'}"
        raise EnvironmentFaultError(msg) from None
    return timeout_text(limits) if reported is None else describe(reported, limits)
