"""Reward `code_tests`: a program that the model wrote passes tests."""

from __future__ import annotations

import ast
import asyncio
import builtins
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from relax_actors.config.sections import Positive, PositiveFloat
from relax_actors.errors import ActorError, RowError
from relax_actors.isolation.sandbox import (
    Limits,
    check_bubblewrap,
    communicate,
    python_command,
    run_program,
    started,
    timeout_text,
)
from relax_actors.messages import Prompt

LARGEST = 100_000
"""Bytes of a program; one argument of a command has room for 128 KiB."""
_PYTHON = ("python", "py", "python3")
_SIGNALLED = 128
# One byte of error output says that the sandbox was started; that of the program is discarded.
_QUIETLY = ("/bin/sh", "-c", 'printf 1 >&2; exec "$@" 2>/dev/null', "sh")
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class InputTest:
    """Standard input of a program, and what it must print."""

    text: str
    expected: str


@dataclass(slots=True)
class _SharedRun:
    """A run of a program, the number of completions that wait for it, and whether it has left the queue."""

    passed: asyncio.Future[list[bool]] = field(init=False)
    waiting: int = 0
    begun: bool = False


class CodeTests:
    """Reward 1 if the program in a completion passes all tests of its row, else 0.

    The program is the last fenced block that is labelled as Python, otherwise the last one without a label, otherwise
    the whole completion. The tests are the row's field `tests`: a list of `{"input": ..., "output": ...}`, where the
    program reads `input` from standard input, must print `output` (white space at the ends of lines ignored) and end
    with exit code 0; or a list of Python statements, such as `assert add(1, 2) == 3`. `test` and `entry_point` as in
    HumanEval are one such test. A function that has the name of one of Python's own is tested only as `entry_point`.

    Every run has a sandbox of its own, without network and files. Statements run in another sandbox than the program:
    they call it through a pipe, so it cannot reach the tests, their results or the process that counts them. Arguments
    and results are plain values (numbers, texts, lists, tuples, sets, dicts); other objects of the program can be
    called and have attributes, but equal nothing and cannot be conditions. Changes that the program makes to its
    arguments do not come back. Hashes of texts are the same in each run. Equal programs with
    equal tests that wait or run at the same time run once.

    Args:
        partial: whether the reward is the share of passed tests instead.
        seconds: wall clock of a program with all its tests.
        memory_mib: memory of each process of a run; where a control group can be created, of all together.
        processes: processes and threads of a run.
        max_output: bytes of output of a run.
        concurrent: programs that an actor runs at once; by default the number of its processors.
        sandbox: "none" runs programs with limits alone, as this user.
    """

    deadline = None
    not_in_sandbox = "its own sandboxes cannot be created in another one"

    def __init__(
        self,
        *,
        partial: bool = False,
        seconds: PositiveFloat = 10.0,
        memory_mib: Annotated[int, Field(ge=64)] = 512,
        processes: Annotated[int, Field(ge=8)] = 16,
        max_output: Positive = 1 << 20,
        concurrent: Positive | None = None,
        sandbox: Literal["bubblewrap", "none"] = "bubblewrap",
    ) -> None:
        self._partial, self._sandbox = partial, sandbox
        self._limits = Limits(seconds, None, memory_mib, processes, output=max_output)
        self._places = asyncio.Semaphore(concurrent or len(os.sched_getaffinity(0)))
        self._runs: dict[tuple[Any, ...], _SharedRun] = {}

    def check_requirements(self) -> None:
        """Check that programs can be run here; raises ConfigError if no sandbox can be created."""
        if self._sandbox == "bubblewrap":
            check_bubblewrap("reward.options.code_tests.sandbox")

    async def __call__(self, completion: str, prompt: Prompt) -> float:
        """Return a completion's reward; raises RowError without tests, or ActorError."""
        tests, entry = tests_of(prompt)
        program = program_of(completion).encode(errors="replace").decode()
        if not program.strip() or "\0" in program or len(program.encode()) > LARGEST:
            return 0.0
        key = (program, tuple(tests), entry)
        if (run := self._runs.get(key)) is None:
            run = self._runs[key] = _SharedRun()
            run.passed = asyncio.ensure_future(self._passed(run, program, tests, entry))
            run.passed.add_done_callback(partial(self._forget, key, run))
        run.waiting += 1
        try:
            # A row that is given up must not end the run that another row waits for.
            passed = await asyncio.shield(run.passed)
        finally:
            run.waiting -= 1
            if not run.waiting and not run.begun:
                self._forget(key, run)
                run.passed.cancel()
        return sum(passed) / len(tests) if self._partial else float(all(passed))

    def _forget(self, key: tuple[Any, ...], run: _SharedRun, ended: asyncio.Future[list[bool]] | None = None) -> None:
        """Let no further completion wait for a run."""
        if self._runs.get(key) is run:
            del self._runs[key]
        if ended is not None and not ended.cancelled():
            ended.exception()  # or asyncio would report it if nobody waits any more

    async def _passed(
        self, run: _SharedRun, program: str, tests: list[InputTest] | list[str], entry: str | None
    ) -> list[bool]:
        """Return which tests a program passes; raises ActorError if no sandbox could be started."""
        async with self._places:
            run.begun = True  # and keeps its place until its sandbox ends
            if isinstance(tests[0], str):
                return await asyncio.to_thread(self._run_statements, program, tests, entry)
            return await asyncio.to_thread(self._run_inputs, program, tests)

    def _run_inputs(self, program: str, tests: Sequence[InputTest]) -> list[bool]:
        """Return which tests pass; with all required, none runs behind a failure."""
        passed: list[bool] = []
        end = time.monotonic() + self._limits.seconds
        for test in tests:
            left = end - time.monotonic()
            passed.append(left > 0 and self._prints(program, test, replace(self._limits, seconds=left)))
            if not passed[-1] and not self._partial:
                break
        return passed

    def _prints(self, program: str, test: InputTest, limits: Limits) -> bool:
        """Run a program with a test's input; raises ActorError if the sandbox could not be started."""
        read, write = os.pipe()
        with os.fdopen(read, "rb") as begun:
            try:
                command = [*_QUIETLY, *_python(), "-c", program]
                ended = run_program(command, test.text, limits, self._sandbox, stderr=write)
            finally:
                os.close(write)
            if begun.read(1) != b"1" and ended.problem != timeout_text(limits):
                raise ActorError(_no_sandbox(ended.problem or ended.output))
        return not ended.problem and _lines(ended.output) == _lines(test.expected)

    def _run_statements(self, program: str, tests: Sequence[str], entry: str | None) -> list[bool]:
        """Return which statements pass in a sandbox beside the program's; raises ActorError."""
        given = json.dumps({"program": program, "tests": tests, "entry": entry}).encode()
        with ExitStack() as stack:
            ours = stack.enter_context(ExitStack())
            ends: list[int] = []
            for _ in range(2):
                pair = os.pipe()
                for end in pair:
                    ours.callback(os.close, end)
                ends += pair
            program_reads, tests_write, tests_read, program_writes = ends
            stack.enter_context(self._started("program", program_reads, program_writes))
            process = stack.enter_context(self._started("tests", tests_read, tests_write, subprocess.PIPE))
            # Each side sees the end of the other, as nobody else holds an end of a pipe.
            ours.close()
            output, stopped = communicate(process, given, self._limits)
            code = process.poll()
        flags = output.split()
        if not flags and not stopped and code is not None and 0 < code < _SIGNALLED:
            raise ActorError(_no_sandbox(f"exit code {code}"))
        passed = [flag == b"true" for flag in flags[: len(tests)]]
        return passed + [False] * (len(tests) - len(passed))

    @contextmanager
    def _started(
        self, script: str, read: int, write: int, stream: int = subprocess.DEVNULL
    ) -> Iterator[subprocess.Popen[bytes]]:
        command = [*_python(), "-c", _script(script), str(read), str(write)]
        quiet = subprocess.DEVNULL
        with started(
            command, self._limits, self._sandbox, stdin=stream, stdout=stream, stderr=quiet, pass_fds=(read, write)
        ) as (process, _):
            yield process


def _python() -> list[str]:
    """Return the command of Python, with `exit`, `quit` and fixed hashes."""
    return ["/usr/bin/env", "PYTHONHASHSEED=0", python_command()[0], "-s"]


def _no_sandbox(why: str) -> str:
    return f"reward code_tests: no sandbox could be started ({why.strip()[-300:]}); `relax check` looks for the cause"


def program_of(completion: str) -> str:
    """Return the program in a completion; see `CodeTests`."""
    labelled: dict[bool, str] = {}
    block: list[str] | None = None
    label = ""
    for line in completion.splitlines(keepends=True):
        if line.startswith("```"):
            if block is None:
                block, label = [], line[3:].strip().lower()
                continue
            if label in ("", *_PYTHON):
                labelled[label in _PYTHON] = "".join(block)
            block = None
        elif block is not None:
            block.append(line)
    return labelled.get(True) or labelled.get(False) or completion


def tests_of(prompt: Prompt) -> tuple[list[InputTest] | list[str], str | None]:
    """Return the tests of a row, and the name of its entry point if it has one.

    Raises:
        RowError: there are none, they are neither all statements nor all inputs with outputs, or a statement uses no
            name of the program.
    """
    tests, entry = prompt.metadata.get("tests"), prompt.metadata.get("entry_point")
    match prompt.metadata:
        case {"test": str(test), "entry_point": str(name)} if tests is None and name.isidentifier():
            return [f"{test}\ncheck({name})"], name
    if entry is None or (isinstance(entry, str) and entry.isidentifier()):
        if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
            if entry is None and (idle := next((test for test in tests if not uses_program(test)), None)):
                msg = f"reward code_tests: the statement {idle!r:.80} uses no name of the program; set entry_point"
                raise RowError(msg)
            return tests, entry
        if isinstance(tests, list) and tests and all(_is_input(test) for test in tests):
            return [InputTest(test["input"], test["output"]) for test in tests], None
    msg = (
        f"reward code_tests reads the field tests of a row as a list of statements or of {{input, output}}, it is "
        f"{tests!r:.80}; the row has {sorted(prompt.metadata)}"
    )
    raise RowError(msg)


def uses_program(test: str) -> bool:
    """Whether a statement may use a name that Python lacks, or is no Python."""
    try:
        names = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return not names <= set(dir(builtins))


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
