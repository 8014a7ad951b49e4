"""A project of docker-compose.yml with its own volumes, ports and run; skipped without a Docker engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.guarded import free_port
from tests.support.running import wait_until

ROOT = Path(__file__).parents[3]
IMAGE = os.environ.get("RELAX_IMAGE", "relax-actors")


def compose_command() -> list[str] | None:
    """Command of Compose v2 or docker-compose 1.29, if a Docker engine answers."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        return None
    if subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0:
        return [docker, "compose"]
    old = shutil.which("docker-compose")
    return [old] if old else None


COMPOSE = compose_command()
LINK = re.compile(r"console of run demo: http://127\.0\.0\.1:(\d+)/#token=(\S+)")
Event = dict[str, Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if COMPOSE is None:
                item.add_marker(pytest.mark.skip(reason="no Docker engine answers, or there is no compose"))


@dataclass
class Project:
    """The containers of one `docker compose up` in a clone."""

    folder: Path
    settings: str
    files: tuple[str, ...] = ("docker-compose.yml",)
    owner: int | None = None
    """User of the host who owns the clone; None for the user of the test."""
    run: str = "demo"
    name: str = field(default_factory=lambda: f"relaxtest{uuid.uuid4().hex[:8]}")
    began: float = 0.0
    profiles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # No folder `runs`: the engine creates it, for root.
        shutil.copy(ROOT / "docker-compose.yml", self.folder)
        for name in ("examples", "deploy"):
            shutil.copytree(ROOT / name, self.folder / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        if self.owner is not None:
            for path in (self.folder, *self.folder.rglob("*")):
                os.chown(path, self.owner, self.owner)
        self.environment = os.environ | {
            "SETTINGS": self.settings,
            "NATS_PORT": str(free_port()),
            "WEBSOCKET_PORT": str(free_port()),
            "CONSOLE_PORT": str(free_port()),
            "RELAX_IMAGE": IMAGE,
        }

    def try_compose(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command, environment = self.command(*arguments), self.environment
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=240
        )

    def compose(self, *arguments: str, check: bool = True) -> str:
        done = self.try_compose(*arguments)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def command(self, *arguments: str) -> list[str]:
        assert COMPOSE is not None
        files = [option for name in self.files for option in ("-f", name)]
        profiles = [option for name in self.profiles for option in ("--profile", name)]
        project = ["-p", self.name, "--project-directory", str(self.folder)]
        return [*COMPOSE, *project, *files, *profiles, *arguments]

    def up(self, *more: str, profiles: tuple[str, ...] = ()) -> None:
        self.began = self.began or time.monotonic()
        self.profiles = profiles or self.profiles
        self.compose("up", "-d", *more)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).split()

    def docker(self, *arguments: str) -> str:
        done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, timeout=120)  # noqa: S607
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kill(self, service: str) -> None:
        """Kill a container, and start it again as an orchestrator would."""
        (container, *_) = self.containers(service)
        self.docker("kill", container)
        self.docker("start", container)

    def relax(self, *arguments: str) -> dict[str, Any]:
        """Run a command with the operator's credentials; return its JSON."""
        return dict(
            json.loads(self.compose("exec", "-T", "prompts", "relax", *arguments, "--json").strip().splitlines()[-1])
        )

    def step(self) -> int:
        """The newest version of the weights, by its file; a command in a container would slow the run down."""
        names = [path.name for path in self.folder.glob(f"runs/{self.run}/store/weights/*.safetensors")]
        return max((int(n) for name in names if (n := name.split(".", 1)[0]).isdigit()), default=-1)

    def await_step(self, step: int, deadline: float = 120) -> int:
        return int(wait_until(lambda: (at := self.step()) >= step and at, f"step {step}\n", deadline))

    def events(self, subject: str, enough: Callable[[list[Event]], object], seconds: int) -> list[Event]:
        """Messages on a subject since the start of the run, as soon as there are enough."""
        listen = ["exec", "-T", "monitor", "timeout", str(seconds), "relax", "tail", subject, "--history"]
        listen += ["--broker", "nats://nats:4222", "--credentials", "/keys"]
        heard: list[Event] = []
        with subprocess.Popen(
            self.command(*listen), cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                heard.append(json.loads(line[line.index("{") :]))
                if enough(heard):
                    process.kill()
                    return heard
        msg = f"{subject} had only {heard} within {seconds} s"
        raise AssertionError(msg)

    def summary(self, deadline: float) -> dict[str, Any]:
        """The result of the run, once it is written."""
        path = self.folder / "runs" / self.run / "summary.json"
        wait_until(path.exists, "summary.json", deadline)
        return dict(json.loads(path.read_text()))

    def console(self, links: int) -> tuple[str, str, dict[str, Any]]:
        """Address, token and `/api/run` of the console, once the console that printed link number `links` answers."""

        def answered() -> tuple[str, str, dict[str, Any]] | None:
            printed = LINK.findall(self.compose("logs", "--no-color", "console"))
            if len(printed) < links:
                return None
            url, head = f"http://127.0.0.1:{printed[-1][0]}", {"Authorization": f"Bearer {printed[-1][1]}"}
            with suppress(httpx.HTTPError):
                answer = httpx.get(f"{url}/api/run", headers=head, trust_env=False, timeout=60)
                if answer.status_code == httpx.codes.OK:
                    return url, printed[-1][1], answer.json()
            return None

        url, token, shown = wait_until(answered, f"answer of the console with link {links}", 120)
        return url, token, dict(shown)

    def assert_ledger_holds(self) -> None:
        found = self.relax("ledger", self.run)
        assert found["violations"] == []
        assert found["admitted"] == sum(found[name] for name in ("trained", "dropped", "quarantined", "in_flight"))

    def down(self) -> None:
        """Remove everything except the logs of the containers."""
        (self.folder / "logs.txt").write_text(self.compose("logs", "--no-color", check=False))
        self.compose("down", "-v", "--timeout", "5", check=False)


@pytest.fixture
def make_project(tmp_path: Path) -> Iterator[Any]:
    made: list[Project] = []

    def make(settings: str, *files: str, owner: int | None = None, run: str = "demo") -> Project:
        clone = tmp_path / "clone"
        clone.mkdir()
        made.append(Project(clone, settings, files or ("docker-compose.yml",), owner, run))
        return made[-1]

    yield make
    for project in made:
        project.down()
