"""Reward `code_tests`: right programs pass, and no hostile one gets a reward, nor costs more than its row."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import Prompt
from relax_actors.rewards import load_reward
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
    "shadowed names": "len = all = abs = lambda *a: True\ndef add(a, b): return 0",
}


@pytest.mark.parametrize("kind", TESTS)
@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_program_gets_no_reward(kind: str, program: str) -> None:
    before = time.monotonic()
    assert reward(program, {"tests": TESTS[kind]}, seconds=1.0, memory_mib=256) == 0.0
    assert time.monotonic() - before < 30


def test_nothing_is_left_of_programs_that_ran() -> None:
    def left() -> tuple[list[str], int]:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        return children, len(list(Path("/proc/self/fd").iterdir()))

    before = left()
    for kind in TESTS:
        reward(HOSTILE["double-forked daemon"], {"tests": TESTS[kind]}, seconds=2.0)
        assert reward(RIGHT[kind], {"tests": TESTS[kind]}) == 1.0
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
