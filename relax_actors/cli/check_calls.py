"""Check of rewards and environments: each is called once, with the first row of the data.

Built-in functions are called in this process. Others run in a process of their own, in the sandbox of their role if it
has one, with a deadline: they may hang, crash, and use any amount of memory. Nothing of the run is touched.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from broker.address import Address
from broker.codec import encode
from relax_actors.cli.trial_call import ENVIRONMENT, described, reward_of_answer, role_of
from relax_actors.config import Config
from relax_actors.envs import bubblewrap
from relax_actors.errors import ConfigError
from relax_actors.messages import Prompt
from relax_actors.registry.catalog import REWARDS
from relax_actors.roles import section_of
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.environment import without_secrets
from relax_actors.supervision.sandbox import SandboxFiles, command, is_sandboxed

SKIP = "or skip the calls by `relax check --no-calls`"
REPORTED = "environment"
"""Reward that is no function of the text: what an environment or an agent reports."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call to try.

    Attributes:
        setting: key that names what is called.
        name: its value.
        data: section with the row.
    """

    setting: str
    name: str | dict[str, float]
    data: str = "data"

    @property
    def functions(self) -> list[str]:
        """Names of what is called."""
        return [self.name] if isinstance(self.name, str) else list(self.name)


def calls_of(config: Config) -> list[Call]:
    """Return what the rows of a run are passed to: rewards, and an environment."""
    found = []
    if config.environment is not None:
        found.append(Call(ENVIRONMENT, config.environment.name))
    if config.reward.actor == "reward":
        found.append(Call("reward.function", config.reward.function))
        if config.eval is not None and config.eval.reward != config.reward.function:
            found.append(Call("eval.reward", config.eval.reward, "eval.data"))
    return [call for call in found if call.setting == ENVIRONMENT or call.functions != [REPORTED]]


def check_call(config: Config, call: Call, import_path: Path, rows: Mapping[str, Prompt]) -> Iterator[str]:
    """Try a call, and note the reward.

    Args:
        config: configuration of the run.
        call: what to call.
        import_path: folder from which dotted paths are imported.
        rows: first row of each section with data.

    Raises:
        ConfigError: it raised an exception, returned no finite number, crashed, or gave no result in time.
    """
    prompt = rows.get(call.data)
    if prompt is None:
        return  # the check of the data has said why
    where = f"{call.setting} = {json.dumps(call.name)}"
    if call.setting != ENVIRONMENT and all(map(_is_harmless, call.functions)):
        try:
            result: dict[str, Any] = {"reward": reward_of_answer(config, call.setting, prompt)}
        except Exception as error:  # noqa: BLE001 reported
            result = {"error": described(error)}
    else:
        if is_sandboxed(config, role_of(call.setting)) and bubblewrap.problem():
            return  # the check of the sandbox has said why
        result = _called_elsewhere(config, call, import_path, prompt, where)
    row = f"the first row of {call.data}"
    if problem := result.get("error"):
        msg = f"{where} failed for {row}: {problem}; fix it or the row, {SKIP}"
        raise ConfigError(msg)
    reward = result["reward"]
    what = "no reward" if reward is None else f"{reward:.4g}"
    yield f"{where} gives {what} for the answer of {row}"


def _is_harmless(name: str) -> bool:
    """Whether a reward function is one of ours that needs no other package."""
    return name in REWARDS.built_in and not hasattr(REWARDS.load(name, ""), "check_requirements")


def _called_elsewhere(config: Config, call: Call, import_path: Path, prompt: Prompt, where: str) -> dict[str, Any]:
    """Call in another process.

    Raises:
        ConfigError: it crashed, or gave no result in time.
    """
    role, seconds = role_of(call.setting), deadline(config, call.setting)
    with tempfile.TemporaryDirectory() as scratch, (Path(scratch) / "output").open("w+b") as output:
        folder = RunFolder(Path(scratch) / "run")
        folder.root.mkdir()
        folder.save_config(config, str(import_path))
        inner = [sys.executable, "-P", "-m", "relax_actors.cli.trial_call", str(folder.root), call.setting]
        start = partial(
            subprocess.Popen,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=without_secrets(os.environ, section_of(config, role).secrets or ()),
            start_new_session=True,
        )
        with _started(start, config, role, folder, inner) as process:
            try:
                written, _ = process.communicate(encode(prompt, "check"), timeout=seconds)
            except subprocess.TimeoutExpired:
                msg = f"{where} gave no result for the first row of {call.data} within {seconds:g} s; "
                remedy = f"bound what it waits for, raise {role}.deadline, {SKIP}"
                raise ConfigError(msg + remedy) from None
            finally:
                with suppress(ProcessLookupError):  # children of the code, or the process itself after the deadline
                    os.killpg(process.pid, signal.SIGKILL)
        if written:
            found: dict[str, Any] = json.loads(written)
            return found
        output.seek(0)
        raise ConfigError(_crash(process.returncode, output.read(), where, call.data))


def deadline(config: Config, setting: str) -> float:
    """Return the seconds that a call may take, the start of its process included."""
    if setting == ENVIRONMENT and (section := config.environment) is not None:
        return section.deadline + section.open_seconds + section.step_seconds
    return config.reward.deadline


def _started(start: Any, config: Config, role: str, folder: RunFolder, inner: list[str]) -> subprocess.Popen[bytes]:
    """Start the process, in the sandbox of its role if it has one."""
    if not is_sandboxed(config, role):
        plain: subprocess.Popen[bytes] = start(inner)
        return plain
    Address("nats://127.0.0.1:1").save(folder.address)  # a call needs no broker
    box = folder.black_box(f"{role}.0")
    box.parent.mkdir(parents=True)
    box.touch()
    with Path(os.devnull).open("w") as info:
        boxed: subprocess.Popen[bytes] = start(
            command(SandboxFiles(folder, role, 0), info.fileno(), inner), pass_fds=[info.fileno()]
        )
    return boxed


def _crash(code: int, output: bytes, where: str, data: str) -> str:
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    said = output.decode(errors="replace").strip().splitlines()[-1:]
    last = f"; the last line of its output: {said[0][:300]}" if said else ""
    return f"{where} ended its process by {how} for the first row of {data}{last}; fix it, {SKIP}"
