"""Containers of model-written code: they end with their caller, and engines that cannot run them are refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relax_actors.config.environment import EnvironmentSection
from relax_actors.envs.forks import Forks
from relax_actors.envs.host import SessionHost
from relax_actors.envs.observation import EnvironmentFaultError
from relax_actors.envs.tools.container import OWNER, check_container
from relax_actors.envs.tools.python import PythonEnvironment, run_code
from relax_actors.errors import ActorError, ConfigError
from relax_actors.isolation.sandbox import Limits
from relax_actors.messages import Act, Open
from tests.support.containers import IMAGE, containers, engine, needs_engine
from tests.support.messages import assert_says
from tests.support.running import wait_until

ATTACKS = """
import ctypes, os, signal, time
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM):
    os.kill(1, number)
for path in ("/proc/1/mem", "/proc/1/environ", "/proc/1/fd/2"):
    try:
        open(path, "r+b")
        print("opened", path)
    except OSError:
        pass
print(ctypes.CDLL(None).ptrace(16, 1, 0, 0), flush=True)
time.sleep(100)
"""
CALLER = f"""
from relax_actors.envs.tools.python import PythonEnvironment, run_code
from relax_actors.isolation.sandbox import Limits
run_code("import time; time.sleep(100)", Limits(seconds=100.0), "container", {IMAGE!r})
"""
SLEEP = '<tool_call>{"name": "run_python", "arguments": {"code": "import time; time.sleep(100)"}}</tool_call>'
OPTIONS = {"sandbox": "container", "image": IMAGE, "seconds": 100.0}


def owner(run: str, n: int) -> dict[str, str]:
    return {OWNER: json.dumps({"relax.run": run, "relax.actor": f"test:{run}:environment.{n}"})}


def never_started(run: str, n: int) -> str:
    """Create a container as an engine leaves it whose client was killed before the start."""
    labels = [f"--label={key}={value}" for key, value in json.loads(owner(run, n)[OWNER]).items()]
    name = f"relax-{run}-{n}-left"
    assert engine("create", "--name", name, *labels, IMAGE, "true").returncode == 0
    return name


@pytest.fixture
def _no_leftovers() -> Iterator[None]:
    yield
    if names := containers():
        engine("rm", "--force", *names)


@needs_engine
def test_program_cannot_harm_the_process_that_ends_it() -> None:
    ended = run_code(ATTACKS, Limits(seconds=2.0), "container", IMAGE)
    assert ended.output == "-1\n"
    assert_says(ended.problem, "2 seconds", "stopped")
    wait_until(lambda: not containers(), "end of the container")


@needs_engine
def test_memory_of_all_processes_is_limited() -> None:
    code = "import os\nfor _ in range(4): os.fork()\nx = bytearray(50 << 20)\nprint(x.count(1), flush=True)"
    ended = run_code(code, Limits(memory_mib=128, processes=32), "container", IMAGE)
    assert ended.output.count("0\n") < 16


@needs_engine
@pytest.mark.parametrize("victim", ["caller", "client"])
@pytest.mark.usefixtures("_no_leftovers")
def test_container_ends_with_its_killed_caller(victim: str) -> None:
    environment = os.environ | owner("killed", 0)
    with subprocess.Popen([sys.executable, "-c", CALLER], env=environment, stderr=subprocess.DEVNULL) as process:
        running = ("ps", "--quiet", "--filter", "label=relax.run=killed")
        wait_until(lambda: bool(engine(*running).stdout), "running container")
        if victim == "client":
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGKILL)
        else:
            process.kill()
        process.wait(60)
    wait_until(lambda: not containers("relax.run=killed"), "end of the container")


@needs_engine
@pytest.mark.usefixtures("_no_leftovers")
def test_killed_actor_leaves_no_container() -> None:
    section = EnvironmentSection(name="python", options=OPTIONS)
    left, others = never_started("mine", 0), {never_started("mine", 1), never_started("other", 0)}
    forks = Forks(section, owner("mine", 0))
    assert left not in containers(), "the start of an actor removes what its last incarnation left"

    async def killed_in_mid_call() -> None:
        host = SessionHost(section, forks)
        await host.open(Open("s", seed=0, task={}), "rollout.0#1")
        acting = asyncio.ensure_future(host.act(Act("s", turn=0, action=SLEEP), "rollout.0#1"))
        running = ("ps", "--quiet", "--filter", "label=relax.actor=test:mine:environment.0")
        await asyncio.to_thread(wait_until, lambda: bool(engine(*running).stdout), "running container")
        os.kill(forks.pid, signal.SIGKILL)
        with pytest.raises(ActorError):
            await acting
        await asyncio.sleep(0)  # closes the session's socket

    asyncio.run(killed_in_mid_call())
    forks.close()
    wait_until(lambda: set(containers()) == others, "end of the container")

    forks = Forks(section, owner("mine", 0))
    never_started("mine", 0)
    forks.close()
    assert set(containers()) == others, "the end of an actor removes its own containers alone"


def test_missing_engine_is_refused(tmp_path: Path) -> None:
    code = "from relax_actors.envs.tools.container import check_container; check_container('python:3.12-slim')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert_says(
        done.stderr.splitlines()[-1],
        "ConfigError",
        'environment.options.sandbox = "container"',
        "docker info",
        "bubblewrap",
    )


@needs_engine
def test_failing_engine_is_not_the_fault_of_the_model() -> None:
    environment = PythonEnvironment()
    environment.sandbox, environment.image = "container", "relax-nowhere:1"
    environment.reset({}, np.random.default_rng(0))
    with pytest.raises(EnvironmentFaultError, match=r"run relax-nowhere:1 failed with exit code 125: .*No such image"):
        asyncio.run(environment.step(SLEEP))


@needs_engine
def test_missing_image_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        check_container("relax-nowhere:1")
    assert_says(
        error.value,
        'environment.options.sandbox = "container"',
        "'relax-nowhere:1'",
        "docker pull relax-nowhere:1",
        "environment.options.image",
    )


@needs_engine
@pytest.mark.usefixtures("_no_leftovers")
def test_image_with_volumes_is_refused() -> None:
    image = "relax-test-volume"
    assert engine("commit", "--change", "VOLUME /data", never_started("volume", 0), image).returncode == 0
    try:
        with pytest.raises(ConfigError) as error:
            check_container(image)
    finally:
        engine("rmi", image)
    assert_says(error.value, repr(image), "VOLUME /data", "environment.options.image")
