"""Chat templates are code of a model's author: hostile ones reach no file and no module, and end within limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relax_actors.config import validate
from relax_actors.data import prompt_maker
from relax_actors.data.prompt_maker import PromptMaker
from relax_actors.data.task import Task
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError, SlowRowError
from relax_actors.runtime.watchdog import limit_memory
from tests.support.chat_folder import make_chat_folder

MESSAGE = "hello"
ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ cycler.__init__.__globals__.os.popen('touch PLANTED').read() }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__class__.__init__.__globals__ }}",
    "filter attr": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "filter map": "{{ ['']|map(attribute='__class__')|map('string')|join }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "format_map": "{{ '{x.__globals__}'.format_map({'x': raise_exception}) }}",
    "traceback": "{{ raise_exception.__code__ }}",
    "loader": "{{ self._TemplateReference__context.environment.loader }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.getcwd() }}",
    "changed messages": "{{ messages.append(1) }}",
}
"""Templates that try to leave Jinja's sandbox or to change what they are given."""
SHOWS_NOTHING = ("filter attr", "filter map", "format_map", "traceback")
"""Escapes for which Jinja's sandbox has an undefined value, which is written as nothing."""
ENDLESS = {
    "nested": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macro": "{% macro m() %}{{ range(9999)|list }}{% endmacro %}{% for a in range(9999) %}{{ m() }}{% endfor %}",
}
LARGE = (
    "{{ 'x' * 4000000000 }}",
    "{% set ns = namespace(x=[1]) %}{% for a in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ '%4000000000d'|format(1) }}",
)
LIMIT_MIB = 600


def maker(folder: Path, template: str) -> PromptMaker:
    make_chat_folder(folder, template + "<|end|>", ["<|end|>"])
    body = {"model": {"path": str(folder)}, "data": {"kind": "jsonl"}, "run": {"name": "x"}}
    return PromptMaker(validate(body, "t").data, Tokenizer(folder), 1000, 10)


def refusal(folder: Path, template: str) -> RowError:
    with pytest.raises(RowError) as caught:
        maker(folder, template).make(Task(MESSAGE, origin="rows.jsonl line 7"), seed=0, min_version=0)
    return caught.value


@pytest.mark.parametrize("name", ESCAPES)
def test_template_reaches_no_module_and_no_file(tmp_path: Path, name: str) -> None:
    template = ESCAPES[name].replace("PLANTED", str(tmp_path / "planted"))
    if name in SHOWS_NOTHING:
        made = maker(tmp_path / "model", template).make(Task(MESSAGE), seed=0, min_version=0)
        assert made.text == "<|end|>"
        return
    said = str(refusal(tmp_path / "model", template))
    for word in ("rows.jsonl line 7", "the chat template of", "raised"):
        assert word in said
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_template_costs_its_row_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(prompt_maker, "MAX_SECONDS", 1.0)
    assert isinstance(refusal(tmp_path / "slow", ENDLESS[name]), SlowRowError)
    assert maker(tmp_path / "good", "{{ messages[0].content }}").make(Task(MESSAGE), seed=0, min_version=0).text


@pytest.mark.slow
def test_large_template_fails_its_row_within_the_limit_of_memory_and_the_process_goes_on(tmp_path: Path) -> None:
    """The limit of `prompts.memory_limit_mib`, in a process of its own."""
    command = [sys.executable, "-m", "tests.security.test_chat_templates", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    *large, good, peak_mib = json.loads(done.stdout)
    for said in large:
        assert "rows.jsonl line 7" in said
        assert "MemoryError" in said or "did not end within" in said, said  # the latter on a crowded machine
    assert good == f"{MESSAGE}<|end|>"
    assert peak_mib < LIMIT_MIB + 500  # libraries are mapped besides


def test_template_that_computes_in_c_is_ended_by_a_signal(tmp_path: Path) -> None:
    """It holds the interpreter, so no limit of time in the process ends it; the deadline of its actor kills it."""
    command = [sys.executable, "-m", "tests.security.test_chat_templates", str(tmp_path), "{{ 10 ** 10 ** 10 }}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        process.kill()
        assert process.wait(30) == -signal.SIGKILL


def main() -> None:
    """Make prompts by hostile templates under a limit of memory, and print how each ended."""
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        made = maker(folder / "own", sys.argv[2])
        sys.stdout.write("begins\n")
        sys.stdout.flush()
        made.make(Task(MESSAGE), seed=0, min_version=0)
    limit_memory(LIMIT_MIB)
    found = [str(refusal(folder / str(n), template)) for n, template in enumerate(LARGE)]
    found.append(maker(folder / "good", "{{ messages[0].content }}").make(Task(MESSAGE), seed=0, min_version=0).text)
    # Not `ru_maxrss`, which a child takes over from its parent.
    (peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    sys.stdout.write(json.dumps([*found, int(peak) >> 10]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
