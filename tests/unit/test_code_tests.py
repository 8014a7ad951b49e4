"""Reward `code_tests`: right programs pass, and no hostile one gets a reward, nor costs more than its row."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.errors import ActorError, ConfigError, RowError
from relax_actors.messages import Prompt
from relax_actors.rewards import load_reward
from relax_actors.rewards.code.reward import program_of
from tests.support.programs import needs_bubblewrap

ADD = [
    "assert add(1, 2) == 3",
    "assert add([1], [2]) == [1, 2]",
    "assert add(1.5, 2) == 3.5 and add((1,), (2,)) == (1, 2)",
]
SUMS = [{"input": "1 2\n", "output": "3"}, {"input": "4 5\n", "output": "9\n"}]
RIGHT = {"statements": "def add(a, b): return a + b", "inputs": "a, b = map(int, input().split())\nprint(a + b)"}
TESTS: dict[str, list[Any]] = {"statements": ADD, "inputs": SUMS}


def prompt(**fields: Any) -> Prompt:
    return Prompt("text", np.zeros(1, np.int32), "", fields, seed=0, min_version=0)


def reward(program: str, fields: dict[str, Any], **options: Any) -> float:
    function = load_reward("code_tests", options={"seconds": 20.0, **options})
    value = asyncio.run(function(program, prompt(**fields)))
    assert isinstance(value, float)
    return value


pytestmark = needs_bubblewrap


@pytest.mark.parametrize("kind", TESTS)
@pytest.mark.parametrize("form", ["{}", "I think:\n```python\nnot this\n```\nor rather\n```python\n{}\n```\nDone."])
def test_a_right_program_passes(kind: str, form: str) -> None:
    assert reward(form.format(RIGHT[kind]), {"tests": TESTS[kind]}) == 1.0


def test_equal_programs_of_a_row_run_once() -> None:
    function, row = load_reward("code_tests"), prompt(tests=["assert coin()"])
    program = "import os\ndef coin(): return os.urandom(1)[0] % 2"

    async def rewards() -> list[float]:
        return await asyncio.gather(*(function(program, row) for _ in range(32)))

    # 32 runs agree by chance once in two thousand million times.
    assert len(set(asyncio.run(rewards()))) == 1


def test_programs_of_a_row_that_is_given_up_leave_the_queue() -> None:
    """The one that runs keeps its place until it ends, so that no more than `concurrent` programs run."""
    seconds, waiting = 2.0, 8
    function, row = load_reward("code_tests", options={"concurrent": 1, "seconds": seconds}), prompt(tests=ADD)

    async def next_reward() -> float:
        given_up = [asyncio.ensure_future(function(f"while True: {n}", row)) for n in range(1 + waiting)]
        await asyncio.sleep(0.1)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        begun = time.monotonic()
        # Less than the time of all that were given up.
        await asyncio.wait_for(function("while True: pass", row), seconds * waiting)
        return time.monotonic() - begun

    # The program that ran, and this one.
    assert asyncio.run(next_reward()) > 1.5 * seconds


def test_program_of_a_row_that_is_given_up_runs_for_another_row() -> None:
    function, row = load_reward("code_tests", options={"seconds": 20.0}), prompt(tests=ADD)

    async def second() -> float:
        both = [asyncio.ensure_future(function(RIGHT["statements"], row)) for _ in range(2)]
        await asyncio.sleep(0.1)
        both[0].cancel()
        return await both[1]

    assert asyncio.run(second()) == 1.0


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (
            "class S:\n    def __init__(self): self.x = 2\n    def f(self, x): return self.x * x",
            ["s = S()\nassert s.f(2) == 4\nassert s.x == 2"],
        ),
        (
            "def f(x):\n    if x < 0: raise ValueError('negative')",
            ["try:\n    f(-1)\nexcept ValueError: pass\nelse: assert False"],
        ),
        (
            "def f(x): return {x, 2}, {'a': None, 1: b'x'}, float('inf')",
            ["import math\nassert f(1) == ({1, 2}, {'a': None, 1: b'x'}, math.inf)"],
        ),
        (
            "import sys\nprint('loaded')\nprint('x', file=sys.stderr)\ndef f(n): print(n); return n",
            ["assert f(n=3) == 3"],
        ),
    ],
)
def test_statements_see_objects_exceptions_and_plain_values(program: str, tests: list[str]) -> None:
    assert reward(program, {"tests": tests}) == 1.0


@pytest.mark.parametrize(
    ("program", "fields"),
    [
        ("def sum(a, b): return a - b", {"tests": ["assert sum(7, 4) == 3"], "entry_point": "sum"}),
        (
            "def sorted(x): return x[::-1]",
            {"test": "def check(f): assert f([2, 1]) == [1, 2]", "entry_point": "sorted"},
        ),
        ("def f(x): return x\nif __name__ == '__main__':\n    f(int(input()))", {"tests": ["assert f(1) == 1"]}),
        ("n = int(input())\nprint(n)\nexit()", {"tests": [{"input": "3", "output": "3"}]}),
        ("from __future__ import annotations\nprint(1)", {"tests": [{"input": "", "output": "1"}]}),
    ],
)
def test_usual_programs_pass(program: str, fields: dict[str, Any]) -> None:
    assert reward(program, fields) == 1.0


def test_a_builtin_is_never_taken_for_the_function_of_the_program() -> None:
    test = {"test": "def check(f): assert f([2, 1]) == [1, 2]", "entry_point": "sorted"}
    assert reward("x = 1", test) == 0.0
    with pytest.raises(RowError, match="name of the program; set entry_point"):
        reward("def sum(a, b): return 3", {"tests": ["assert sum(1, 2) == 3"]})


@pytest.mark.parametrize(
    "completion",
    [
        "```python\nprint(1)\n```\nIt prints:\n```\n1\n```",
        "```bash\nls\n```\n```\nprint(1)\n```",
        "```py\nprint(1)\n```\nRun it:\n```bash\npython x.py\n```",
        "print(1)",
    ],
)
def test_the_program_is_the_block_of_python(completion: str) -> None:
    assert program_of(completion).strip() == "print(1)"


def test_one_failed_statement_leaves_the_passed_ones() -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 2"]
    program = "def f(x):\n    while x == 2: pass\n    return x"
    assert reward(program, {"tests": tests}, partial=True, seconds=1.5) == 0.5


def test_hashes_are_the_same_in_each_run() -> None:
    # The hash decides over the exit code, and so over the reward.
    program = "import sys\nsys.exit(hash('a') % 2)"
    assert len({reward(program, {"tests": [{"input": "", "output": ""}]}) for _ in range(8)}) == 1


@pytest.mark.parametrize("odd", ["\0", "\ud800", "\x1b"])
def test_an_odd_character_costs_its_sample_alone(odd: str) -> None:
    assert reward(f"x = '{odd}'\nprint(2)", {"tests": SUMS}) == 0.0
    assert reward(f"x = '{odd}'\ndef add(a, b): return 0", {"tests": ADD}) == 0.0


def test_a_sandbox_that_cannot_start_gives_no_reward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    function = load_reward("code_tests")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for kind, tests in TESTS.items():
        with pytest.raises(ActorError, match="no sandbox could be started"):
            asyncio.run(function(RIGHT[kind], prompt(tests=tests)))


def test_a_test_with_an_entry_point_gets_the_function() -> None:
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate('a', 'b') == 'ab'"
    assert reward(RIGHT["statements"], {"test": test, "entry_point": "add"}) == 1.0
    assert reward("def add(a, b): return 3", {"test": test, "entry_point": "add"}) == 0.0


@pytest.mark.parametrize("kind", TESTS)
def test_the_share_of_passed_tests_can_be_the_reward(kind: str) -> None:
    half = {"statements": "def add(a, b): return 3", "inputs": "print(3)"}
    assert reward(half[kind], {"tests": TESTS[kind]}) == 0.0
    assert reward(half[kind], {"tests": TESTS[kind]}, partial=True) == pytest.approx(1 / len(TESTS[kind]))


HOSTILE = {
    "endless loop": "while True: pass",
    "memory": "x = bytearray(4 << 30)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "output flood": "while True: print('x' * 100000)",
    "network": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1/')",
    "writes elsewhere": "open('/usr/written', 'w')",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(1, 9)\nos.kill(-1, 9)",
    "double-forked daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(600)
raise SystemExit(1)
""",
    "forged result file": "open('/tmp/result', 'w').write('[true, true, true]')\nprint('[true, true, true]')",
    "forged answers": """
import os
for i in range(3, 64):
    try: os.write(i, b'[true, true, true]\\n["value", 3]\\n')
    except OSError: pass
""",
    "objects that equal everything": """
class T(float):
    def __eq__(self, other): return True
    def __bool__(self): return True
def add(a, b): return T()
""",
    "not a number": "def add(a, b): return float('nan')\nprint('nan')",
    "infinity": "def add(a, b): return float('inf')\nprint('inf')",
    "more than 1": "def add(a, b): return 1.5\nprint(1.5)",
    "exit code ignored": "import os\nprint(input() and 3, flush=True)\nos._exit(1)",
    "test file overwritten": """
import sys
for name in ('/proc/self/fd/0', 'tests.py', sys.argv[0]):
    try: open(name, 'w').write('')
    except OSError: pass
""",
    "patched assert": """
import builtins
builtins.AssertionError = type('E', (BaseException,), {})
builtins.__build_class__ = None
""",
    "exit before the tests": "import sys\nsys.exit(0)",
    "exit in a call": "import os\ndef add(a, b): os._exit(0)",
    "own truth": "class T:\n    def __bool__(self): return True\ndef add(a, b): return T()",
    "early stop": "def add(a, b): raise StopIteration",
    "failing text": "class E(Exception):\n    def __str__(self): raise self\ndef add(a, b): raise E",
    "number without end": "def add(a, b): return 10 ** 100_000",
    "shadowed names": "len = all = abs = lambda *a: True\ndef add(a, b): return 0",
}


@pytest.mark.parametrize("kind", TESTS)
@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_program_gets_no_reward(kind: str, program: str) -> None:
    before = time.monotonic()
    assert reward(program, {"tests": TESTS[kind]}, seconds=1.0, memory_mib=256) == 0.0
    assert time.monotonic() - before < 30


@pytest.mark.slow
def test_hostile_programs_of_a_row_cost_their_own_samples_alone() -> None:
    async def scores() -> list[float]:
        function = load_reward("code_tests", options={"seconds": 2.0, "memory_mib": 256})
        row = prompt(tests=ADD)
        programs = [one for hostile in HOSTILE.values() for one in (hostile, RIGHT["statements"])]
        return await asyncio.gather(*(function(program, row) for program in programs))

    assert asyncio.run(scores()) == [0.0, 1.0] * len(HOSTILE)


def test_nothing_is_left_of_programs_that_ran() -> None:
    def left() -> tuple[list[str], int]:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        return children, len(list(Path("/proc/self/fd").iterdir()))

    before = left()
    for kind, tests in TESTS.items():
        reward(HOSTILE["double-forked daemon"], {"tests": tests}, seconds=2.0)
        assert reward(RIGHT[kind], {"tests": tests}) == 1.0
    assert left() == before


@pytest.mark.parametrize(
    "fields", [{}, {"tests": []}, {"tests": ["x", {"input": "1"}]}, {"tests": [{"input": 1, "output": "2"}]}]
)
def test_a_row_without_tests_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RowError, match="code_tests reads the field tests"):
        reward("print(1)", fields)


def test_a_program_that_is_too_long_or_empty_gets_nothing() -> None:
    assert reward("#" * 200_000 + RIGHT["inputs"], {"tests": SUMS}) == 0.0
    assert reward(" \n", {"tests": SUMS}) == 0.0


def test_a_wrong_option_names_the_setting() -> None:
    with pytest.raises(
        ConfigError, match=r"reward.options.code_tests.second: unknown option .* did you mean 'seconds'"
    ):
        load_reward("code_tests", options={"second": 3})
