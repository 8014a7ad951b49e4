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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from broker.address import Address
from broker.codec import encode
from broker.process import kill_group
from relax_actors.checks.trial_call import ENVIRONMENT, described, reward_of_answer, role_of
from relax_actors.config import Config
from relax_actors.data.checked_run import CheckedRun
from relax_actors.errors import ConfigError
from relax_actors.isolation import bubblewrap
from relax_actors.isolation.control_group import PREFIX, control_group
from relax_actors.messages import Prompt
from relax_actors.registry.catalog import REWARDS
from relax_actors.roles import section_of
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.environment import without_secrets
from relax_actors.supervision.sandbox import SandboxFiles, command, is_sandboxed, limits

END_BYTES = 1 << 16
"""Bytes of output that are read, from its end."""
SKIP = "or skip the calls by `relax check --no-calls`"
REPORTED = "environment"
"""Reward that is no function of the text: what an environment or an agent reports."""
FILES = ("row", "result", "output")
"""Standard input, output and error output of a process that calls something."""


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
    calls = []
    if config.environment is not None:
        calls.append(Call(ENVIRONMENT, config.environment.name))
    if config.reward.actor == "reward":
        calls.append(Call("reward.function", config.reward.function))
        for where, each in config.held_out_sets.items():
            calls.append(Call(f"{where}.reward", each.reward, f"{where}.data"))
    known = {REPORTED, *config.roles}
    return [call for call in calls if call.setting == ENVIRONMENT or not known.issuperset(call.functions)]


def check_calls(run: CheckedRun, import_path: Path) -> list[Callable[[], Iterator[str]]]:
    """Return checks that call rewards and the environment, if they are on this machine."""
    calls = [call for call in calls_of(run.config) if role_of(call.setting) in run.here]
    return [partial(check_call, run.config, call, import_path, run.first_rows) for call in calls]


def check_call(config: Config, call: Call, import_path: Path, rows: Mapping[str, Prompt]) -> Iterator[str]:
    """Try a call and note the reward; raises ConfigError if it fails."""
    prompt = rows.get(call.data)
    if prompt is None:
        return  # the check of the data has said why
    where = f"{call.setting} = {json.dumps(call.name)}"
    functions = [name for name in call.functions if name not in config.roles]
    if call.setting != ENVIRONMENT and all(map(_is_harmless, functions)):
        try:
            result: dict[str, Any] = {"reward": reward_of_answer(config, call.setting, prompt)}
        except Exception as error:  # noqa: BLE001 reported
            result = {"error": described(error)}
    else:
        if any(medium.stored for medium in prompt.media):
            yield f"{where} is not called: a run copies the media of the first row of {call.data} to its store first"
            return
        if is_sandboxed(config, role_of(call.setting)) and bubblewrap.problem():
            return  # the check of the sandbox has said why
        result = _called_elsewhere(config, call, import_path, prompt, where)
    row = f"the first row of {call.data}"
    if problem := result.get("error"):
        msg = f"{where} failed for {row}: {problem}; fix it or the row, {SKIP}"
        raise ConfigError(msg)
    reward = result["reward"]
    roles = ", ".join(name for name in call.functions if name in config.roles)
    without = f", without the scores of {roles}" if roles and call.setting != ENVIRONMENT else ""
    what = "no reward" if reward is None else f"{reward:.4g}"
    yield f"{where} gives {what} for the answer of {row}{without}"


def _is_harmless(name: str) -> bool:
    """Whether a reward function is built in, needs no optional package, and cannot take long."""
    if name not in REWARDS.built_in:
        return False
    function = REWARDS.load(name, "")
    return not hasattr(function, "check_requirements") and not getattr(function, "may_hang", False)


def _called_elsewhere(config: Config, call: Call, import_path: Path, prompt: Prompt, where: str) -> dict[str, Any]:
    """Call in another process; raises ConfigError if it crashed, or gave no result in time."""
    role, seconds = role_of(call.setting), deadline(config, call.setting)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        # Files, since processes that the code starts may hold the end of a pipe for good.
        row, result, output = (stack.enter_context((Path(scratch) / name).open("w+b")) for name in FILES)
        row.write(encode(prompt, "check"))
        row.seek(0)
        folder = RunFolder(Path(scratch) / "run")
        folder.root.mkdir()
        folder.save_config(config, str(import_path))
        inner = [sys.executable, "-P", "-m", "relax_actors.checks.trial_call", str(folder.root), call.setting]
        start = partial(
            subprocess.Popen,
            stdin=row,
            stdout=result,
            stderr=output,
            env=without_secrets(os.environ, section_of(config, role).secrets or ()),
            start_new_session=True,
        )
        inner, inherited = stack.enter_context(_boxed(config, role, folder, inner))
        with start(inner, pass_fds=inherited) as process:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                msg = f"{where} gave no result for the first row of {call.data} within {seconds:g} s; "
                remedy = f"bound what it waits for, raise {role}.deadline, {SKIP}"
                raise ConfigError(msg + remedy) from None
            finally:
                kill_group(process.pid)  # children of the code, or the process itself after the deadline
        if (given := _result(_end(result))) is not None:
            return given
        raise ConfigError(_crash(process.returncode, _end(output), where, call.data))


def _end(file: BinaryIO) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
    return file.read()


def _result(written: bytes) -> dict[str, Any] | None:
    """Return the result of `trial_call`; None without one, or for anything else."""
    with suppress(ValueError, TypeError, LookupError):
        body = json.loads(written)
        if "error" in body:
            return {"error": str(body["error"])}
        return {"reward": None if body["reward"] is None else float(body["reward"])}
    return None


def deadline(config: Config, setting: str) -> float:
    """Return the seconds that a call may take, the start of its process included."""
    if setting == ENVIRONMENT and (section := config.environment) is not None:
        return section.deadline + section.open_seconds + section.step_seconds
    return config.reward.deadline


@contextmanager
def _boxed(config: Config, role: str, folder: RunFolder, inner: list[str]) -> Iterator[tuple[list[str], list[int]]]:
    """Yield a command in its role's sandbox, if any, and its descriptors."""
    if not is_sandboxed(config, role):
        yield inner, []
        return
    Address("nats://127.0.0.1:1").save(folder.address)  # a call needs no broker
    box = folder.black_box(f"{role}.0")
    box.parent.mkdir(parents=True)
    box.touch()
    bounds = limits(config, role)
    with (
        Path(os.devnull).open("w") as info,
        control_group(f"{PREFIX}{os.getpid()}.1", bounds) as group,
        command(SandboxFiles(folder, role, 0), info.fileno(), inner) as (boxed, descriptor),
    ):
        yield [*(group.enter if bounds else ()), *boxed], [info.fileno(), descriptor]


def _crash(code: int, output: bytes, where: str, data: str) -> str:
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    said = output.decode(errors="replace").strip().splitlines()[-1:]
    last = f"; the last line of its output: {said[0][:300]}" if said else ""
    return f"{where} ended its process by {how} for the first row of {data}{last}; fix it, {SKIP}"
