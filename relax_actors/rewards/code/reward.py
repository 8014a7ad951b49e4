"""Reward `code_tests`: a program that the model wrote passes tests."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from relax_actors.errors import RowError
from relax_actors.isolation.sandbox import Limits, check_bubblewrap, communicate, python_command, run_program, started
from relax_actors.messages import Prompt

LARGEST = 100_000
"""Bytes of a program; one argument of a command has room for 128 KiB."""
_FENCED = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_HERE = Path(__file__).parent
# Without its error output, which a warning would mix into what is compared.
_QUIETLY = ("/bin/sh", "-c", 'exec "$@" 2>/dev/null', "sh")


@dataclass(frozen=True, slots=True)
class InputTest:
    """Standard input of a program, and what it must print."""

    text: str
    expected: str


class CodeTests:
    """Reward 1 if the program in a completion passes all tests of its row, else 0.

    The program is the last fenced block of the completion, or all of it without one. The tests are the row's field
    `tests`: a list of `{"input": ..., "output": ...}`, of which the program reads the one from standard input and must
    print the other (white space at the ends of lines ignored) and end with exit code 0; or a list of Python statements,
    such as `assert add(1, 2) == 3`. Fields `test` and `entry_point` as in HumanEval are one such test.

    Every run has a sandbox of its own, without network and files. Statements run in another sandbox than the program:
    they call it through a pipe, so it cannot reach the tests, their results or the process that counts them. Arguments
    and results are plain values (numbers, texts, lists, tuples, sets, dicts); other objects of the program can be
    called and have attributes, but equal nothing and have no truth. Changes that the program makes to its arguments do
    not come back.

    Args:
        partial: whether the reward is the share of passed tests instead.
        seconds: wall clock of a run: of one input, or of all statements together.
        memory_mib: memory of each process of a run; where a control group can be created, of all together.
        processes: processes and threads of a run.
        max_output: bytes of output of a run.
        concurrent: programs that an actor runs at once; 0 for the number of its processors.
        sandbox: "none" runs programs with limits alone, as this user.
    """

    deadline = None
    not_in_sandbox = "its own sandboxes cannot be created in another one"

    def __init__(
        self,
        *,
        partial: bool = False,
        seconds: float = 10.0,
        memory_mib: int = 512,
        processes: int = 16,
        max_output: int = 1 << 20,
        concurrent: int = 0,
        sandbox: Literal["bubblewrap", "none"] = "bubblewrap",
    ) -> None:
        self._partial, self._sandbox = partial, sandbox
        self._limits = Limits(seconds, None, memory_mib, processes, output=max_output)
        self._places = asyncio.Semaphore(concurrent or len(os.sched_getaffinity(0)))

    def check_requirements(self) -> None:
        """Check that programs can be run here.

        Raises:
            ConfigError: no sandbox can be created.
        """
        if self._sandbox == "bubblewrap":
            check_bubblewrap("reward.options.code_tests.sandbox")

    async def __call__(self, completion: str, prompt: Prompt) -> float:
        """Return the reward of a completion.

        Raises:
            RowError: the row has no tests.
        """
        tests = tests_of(prompt)
        program = program_of(completion)
        if not program.strip() or len(program.encode(errors="replace")) > LARGEST:
            return 0.0
        async with self._places:
            passed = await asyncio.to_thread(self._run, program, tests)
        return sum(passed) / len(passed) if self._partial else float(all(passed))

    def _run(self, program: str, tests: Sequence[InputTest] | Sequence[str]) -> list[bool]:
        """Return which tests a program passes; those behind a failed one are not run if all must pass."""
        statements = [test for test in tests if isinstance(test, str)]
        if statements:
            return self._run_statements(program, statements)
        passed: list[bool] = []
        for test in tests:
            assert isinstance(test, InputTest)  # noqa: S101 tests are of one kind
            passed.append(self._prints(program, test))
            if not passed[-1] and not self._partial:
                break
        return passed

    def _prints(self, program: str, test: InputTest) -> bool:
        command = [*_QUIETLY, *python_command()[:-1], "-c", program]
        ended = run_program(command, test.text, self._limits, self._sandbox)
        return not ended.problem and _lines(ended.output) == _lines(test.expected)

    def _run_statements(self, program: str, tests: list[str]) -> list[bool]:
        """Run statements in one sandbox against the program in another one."""
        given = json.dumps({"program": program, "tests": tests}).encode()
        with ExitStack() as stack:
            ours = stack.enter_context(ExitStack())
            (program_reads, tests_write), (tests_read, program_writes) = os.pipe(), os.pipe()
            for end in (program_reads, program_writes, tests_read, tests_write):
                ours.callback(os.close, end)
            stack.enter_context(self._started("program", program_reads, program_writes))
            process = stack.enter_context(self._started("tests", tests_read, tests_write, subprocess.PIPE))
            # Each side sees the end of the other, as nobody else holds an end of a pipe.
            ours.close()
            output, _ = communicate(process, given, self._limits)
        try:
            passed = json.loads(output)
        except ValueError:
            return [False] * len(tests)
        right = isinstance(passed, list) and len(passed) == len(tests) and all(type(flag) is bool for flag in passed)
        return passed if right else [False] * len(tests)

    @contextmanager
    def _started(
        self, script: str, read: int, write: int, stream: int = subprocess.DEVNULL
    ) -> Iterator[subprocess.Popen[bytes]]:
        command = [*python_command()[:-1], "-c", _script(script), str(read), str(write)]
        quiet = subprocess.DEVNULL
        with started(
            command, self._limits, self._sandbox, stdin=stream, stdout=stream, stderr=quiet, pass_fds=(read, write)
        ) as (process, _):
            yield process


def program_of(completion: str) -> str:
    """Return the last fenced block of a completion, or all of it without one."""
    blocks = _FENCED.findall(completion)
    return str(blocks[-1]) if blocks else completion


def tests_of(prompt: Prompt) -> list[InputTest] | list[str]:
    """Return the tests of a row.

    Raises:
        RowError: there are none, or they are neither all statements nor all inputs with outputs.
    """
    found = prompt.metadata.get("tests")
    match prompt.metadata:
        case {"test": str(test), "entry_point": str(name)} if found is None:
            return [f"{test}\ncheck({name})"]
    if isinstance(found, list) and found:
        if all(isinstance(test, str) for test in found):
            return found
        if all(_is_input(test) for test in found):
            return [InputTest(test["input"], test["output"]) for test in found]
    msg = (
        f"reward code_tests reads the field tests of a row as a list of statements or of {{input, output}}, it is "
        f"{found!r:.80}; the row has {sorted(prompt.metadata)}"
    )
    raise RowError(msg)


def _is_input(test: Any) -> bool:
    return isinstance(test, dict) and all(isinstance(test.get(key), str) for key in ("input", "output"))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


@lru_cache(maxsize=2)
def _script(name: str) -> str:
    """Return a script that runs in a sandbox, with the exchange of values as its part."""
    script = (_HERE / f"{name}.py").read_text()
    imported = "from relax_actors.rewards.code.exchange import Channel, packed, unpacked\n"
    future = "from __future__ import annotations\n"
    return (_HERE / "exchange.py").read_text() + script.replace(imported, "").replace(future, "")
