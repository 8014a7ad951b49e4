"""Runs an agent program: task file, bounded output, and an end for all of its processes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from broker.files import write_private
from broker.process import kill_group, spawn
from relax_actors.errors import ConfigError
from relax_actors.isolation.orphans import kill_orphans
from relax_actors.serving.session_client import AgentResult, AgentTask

KEPT = ("PATH", "HOME", "LANG", "TMPDIR")
MAX_RESULT_BYTES = 64 << 10
MAX_METRICS = 64
TAIL_BYTES = 500
_running: set[int] = set()
"""Programs that run; a process that such a program has detached is adopted by this one when the program ends."""


class AgentError(Exception):
    """The agent failed: it ended with another code than 0, or wrote a result that is none."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run for each sample.

    Attributes:
        command: its path and arguments.
        cwd: working directory; None for a folder of the sample.
        environment: further environment variables.
        max_output_bytes: output that is kept.
    """

    command: Sequence[str]
    cwd: Path | None
    environment: Mapping[str, str]
    max_output_bytes: int

    def check(self) -> None:
        """Find the program and its folder; raises ConfigError if one does not exist."""
        if self._find() is None:
            msg = (
                f"agent.command {self.command[0]!r} is no program; name one on the PATH, or the path of a file that "
                "may be executed (chmod +x)"
            )
            raise ConfigError(msg)
        if self.cwd is not None and not self.cwd.is_dir():
            msg = f"agent.cwd {self.cwd} is no folder; create it, or leave it out"
            raise ConfigError(msg)

    def _find(self) -> str | None:
        path = shutil.which(self.command[0], path=self.environment.get("PATH", os.environ.get("PATH", os.defpath)))
        return None if path is None else str(Path(path).absolute())

    async def run(self, task: AgentTask, folder: Path) -> AgentResult:
        """Run the program for a sample in an empty folder, in a thread that lives as long as it.

        A cancelled call kills it with all processes of its group.

        Raises:
            AgentError: it failed.
        """
        files = {name: folder / f"{name}.json" for name in ("task", "result")}
        # Without the token of the session, which stays out of all files: the program has it in its environment.
        told = {name: value for name, value in asdict(task).items() if name != "api_key"}
        write_private(files["task"], json.dumps(told))
        program = self._find()
        if program is None:
            msg = f"{self.command[0]!r} is no program on the PATH"
            raise AgentError(msg)
        # Before the program starts: it may put something into its folder on which opening blocks.
        log = (folder / "output.log").open("xb")
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            process = spawn(
                [program, *self.command[1:]],
                log=writing,
                environment=self._environment(task, files),
                cwd=self.cwd or folder,
            )
        except BaseException:
            os.close(reading)
            log.close()
            raise
        finally:
            os.close(writing)
        _running.add(process.pid)
        output = asyncio.ensure_future(self._keep_output(reading, log))
        try:
            code = await _ended(process)
        except asyncio.CancelledError:
            kill_group(process.pid)
            await _ended(process)
            raise
        finally:
            kill_group(process.pid)  # what it left behind
            _running.discard(process.pid)
            kill_orphans(_running)
            tail = ""
            with suppress(TimeoutError):
                tail = (await asyncio.wait_for(output, 5)).decode(errors="replace")
        if code != 0:
            msg = f"agent.command ended with code {code}; its last output: {tail}"
            raise AgentError(msg)
        return read_result(files["result"])

    def _environment(self, task: AgentTask, files: Mapping[str, Path]) -> dict[str, str]:
        own = {name: os.environ[name] for name in KEPT if name in os.environ}
        return own | {
            **self.environment,
            "RELAX_SESSION": task.session,
            "RELAX_TASK_FILE": str(files["task"].absolute()),
            "RELAX_RESULT_FILE": str(files["result"].absolute()),
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "ANTHROPIC_BASE_URL": task.anthropic_base_url,
            "ANTHROPIC_API_KEY": task.api_key,
        }

    async def _keep_output(self, pipe: int, file: IO[bytes]) -> bytes:
        """Write the first bytes of the output to a file and drain the rest.

        Returns:
            The last bytes.
        """
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 16)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", buffering=0)
        )
        left, tail = self.max_output_bytes, b""
        try:
            with file:
                while data := await reader.read(1 << 16):
                    file.write(data[:left])
                    left = max(0, left - len(data))
                    tail = (tail + data)[-TAIL_BYTES:]
        finally:
            transport.close()
        return tail


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process without using a thread of the event loop."""
    loop = asyncio.get_running_loop()
    descriptor, ended = os.pidfd_open(process.pid), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


def read_result(path: Path) -> AgentResult:
    """Return the result of an agent, without reward if there is no file; raises AgentError."""
    if not path.exists():
        return AgentResult()
    try:
        body = json.loads(_content(path))
        metrics, rewards = (_numbers(body.get(name, {})) for name in ("metrics", "rewards"))
        reward = body.get("reward")
        result = AgentResult(None if reward is None else _number(reward), metrics, rewards)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        msg = (
            f'{path.name} is not {{"reward": <number>, "metrics": {{<name>: <number>}}}}, or with players '
            f'{{"rewards": {{<player>: <number>}}}}: {str(error)[:200]}'
        )
        raise AgentError(msg) from error
    if len(metrics) > MAX_METRICS:
        msg = f"{path.name} has {len(metrics)} metrics, more than {MAX_METRICS}"
        raise AgentError(msg)
    return result


def _content(path: Path) -> bytes:
    """Return the content of a regular file; an agent may leave a link, or a pipe that blocks."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            msg = "it is no regular file"
            raise ValueError(msg)
        return file.read(MAX_RESULT_BYTES + 1)


def _numbers(value: Any) -> dict[str, float]:
    return {str(name): _number(one) for name, one in value.items()}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        msg = f"{value!r:.80} is no finite number"
        raise ValueError(msg)
    return float(value)
