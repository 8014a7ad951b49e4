"""Agents that are programs: their number, what they leave behind, and what they put where their result belongs."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from relax_actors.serving.agent_process import AgentError, Program, read_result
from relax_actors.serving.session_client import AgentResult, AgentTask
from relax_actors.serving.tokens import session_token
from tests.support.programs import needs_programs
from tests.support.scripted_policy import SECRET, serve

ROOT = Path(__file__).parents[2]
TASK = AgentTask("group-0-0-0-0", "http://127.0.0.1:1/v1", "http://127.0.0.1:1", "key", {"prompt": "x"}, 60.0)


def run(code: str, folder: Path) -> AgentResult:
    folder.mkdir()
    program = Program([sys.executable, "-I", "-S", "-c", code], None, {}, 1000)
    return asyncio.run(asyncio.wait_for(program.run(TASK, folder), 60))


@needs_programs("jq curl", "jq", "curl")
def test_shell_script_of_the_documentation_is_an_agent(tmp_path: Path) -> None:
    (script,) = re.findall(r"```sh\n(#!/bin/sh.*?)```", (ROOT / "docs/how-to/agents.md").read_text(), re.DOTALL)
    (tmp_path / "agent.sh").write_text(script)
    (tmp_path / "agent.sh").chmod(0o755)
    (tmp_path / "sample").mkdir()
    session = "group-3-1-0-0"
    with serve(tmp_path / "model", lambda prompt: "A 7." if "again" in prompt else "Which?") as (url, policy):
        base = f"{url}/sessions/{session}"
        asked = {"messages": [{"role": "user", "content": "say 7"}]}
        task = AgentTask(session, f"{base}/v1", base, session_token(SECRET, session), asked, 60.0)
        program = Program([str(tmp_path / "agent.sh")], None, {}, 1000)
        result = asyncio.run(asyncio.wait_for(program.run(task, tmp_path / "sample"), 60))
    assert result.reward == 1.0
    whole = [*asked["messages"], {"role": "assistant", "content": "Which?"}, {"role": "user", "content": "again"}]
    assert [call.messages for call in policy.calls] == [asked["messages"], whole]
    assert {call.session for call in policy.calls} == {session}
    assert json.loads((tmp_path / "sample" / "answer.json").read_text())["choices"][0]["message"]["content"] == "A 7."


def test_players_of_the_documentation_are_an_agent(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/agents.md").read_text()
    (code,) = re.findall(r"```python\n(async def review.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"openai": openai, "AgentTask": AgentTask, "AgentResult": AgentResult}
    exec(code, names)  # noqa: S102 the code of the page
    session, asked = "group-3-1-0-0", [{"role": "user", "content": "6 times 7?"}]
    with serve(tmp_path, lambda prompt: "yes" if "right" in prompt else "It is 42.") as (url, policy):
        base = f"{url}/sessions/{session}"
        task = AgentTask(session, f"{base}/v1", base, session_token(SECRET, session), {"messages": asked}, 60.0)
        result = asyncio.run(names["review"](task))
    assert result.rewards == {"solver": 1.0, "critic": 1.0}
    assert [call.player for call in policy.calls] == ["solver", "critic"]
    assert policy.calls[0].messages == asked


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ({"rewards": {"solver": 1, "critic": 0.5}}, AgentResult(None, {}, {"solver": 1.0, "critic": 0.5})),
        ({"reward": 0.5, "metrics": {"tools": 3}}, AgentResult(0.5, {"tools": 3.0}, {})),
    ],
)
def test_result_file_names_one_reward_or_those_of_players(
    tmp_path: Path, result: dict[str, Any], found: AgentResult
) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert read_result(tmp_path / "result.json") == found


@pytest.mark.parametrize("rewards", [{"solver": "much"}, [1.0], {"solver": True}])
def test_result_file_with_other_rewards_fails_its_agent(tmp_path: Path, rewards: Any) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"rewards": rewards}))
    with pytest.raises(AgentError, match=r"result\.json.*rewards"):
        read_result(tmp_path / "result.json")


def test_more_programs_than_threads_run_at_once_and_each_end_is_noticed(tmp_path: Path) -> None:
    """The event loop has one thread for blocking calls, as one with many cores has a few."""
    from concurrent.futures import ThreadPoolExecutor

    waits = "import os, time\nwhile not os.path.exists('../go'): time.sleep(0.01)"

    async def run_all() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        folders = [tmp_path / str(n) for n in range(4)]
        for folder in folders:
            folder.mkdir()
        programs = [Program([sys.executable, "-I", "-S", "-c", code], None, {}, 1000) for code in (waits, waits, "")]
        tasks = [asyncio.ensure_future(p.run(TASK, folder)) for p, folder in zip(programs, folders, strict=False)]
        await asyncio.wait_for(asyncio.shield(tasks[2]), 30)
        assert not tasks[0].done()
        (tmp_path / "go").touch()
        await asyncio.wait_for(asyncio.gather(*tasks), 30)

    asyncio.run(run_all())


@pytest.mark.parametrize(
    "leaves",
    [
        "os.mkfifo('result.json')",
        "os.mkdir('result.json')",
        "os.symlink('/dev/zero', 'result.json')",
        "os.remove('output.log'); os.mkfifo('output.log'); sys.exit(3)",
    ],
)
def test_what_a_program_leaves_in_its_folder_never_blocks(tmp_path: Path, leaves: str) -> None:
    before = time.monotonic()
    with pytest.raises(
        AgentError, match=r"^(result\.json is not |agent\.command ended with code 3; its last output: hi)"
    ):
        run(f"import os, sys; print('hi', flush=True); {leaves}", tmp_path / "sample")
    assert time.monotonic() - before < 30


@pytest.mark.slow
def test_processes_that_a_program_detached_end_with_it(tmp_path: Path) -> None:
    """In a process of its own: a subreaper ends every child that it does not know, servers of other tests included."""
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        open('pid.new', 'w').write(str(os.getpid()))\n        os.rename('pid.new', 'pid')\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
        "while not os.path.exists('pid'): time.sleep(0.01)\n"
    )
    reaper = (
        "import sys\nfrom pathlib import Path\nfrom relax_actors.isolation.orphans import become_subreaper\n"
        "from relax_actors.serving.session_client import AgentResult\n"
        "from tests.integration.test_agent_process import run\n"
        "become_subreaper()\nfolder = Path(sys.argv[1])\nassert run(sys.argv[2], folder) == AgentResult()\n"
        "pid = int((folder / 'pid').read_text())\n"
        "assert not Path(f'/proc/{pid}/exe').exists()\n"
    )
    command = [sys.executable, "-c", reaper, str(tmp_path / "sample"), code]
    ended = subprocess.run(command, cwd=ROOT, timeout=100, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
