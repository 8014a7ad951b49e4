"""What environments return is checked: each wrong value gives an error that says what was returned."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_actors.config.environment import EnvironmentSection
from relax_actors.envs import Environment, Step
from relax_actors.envs.forks import Forks
from relax_actors.envs.host import SessionHost
from relax_actors.envs.loading import load_environment
from relax_actors.envs.observation import EnvironmentFaultError, answer_of, checked_state
from relax_actors.errors import ConfigError
from relax_actors.messages import Act, EnvironmentAnswer, Open
from tests.support.running import wait_until

SUPPORT = "tests.support.environments"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("observation", "messages"),
    [
        ("", []),
        ("hi", [{"role": "user", "content": "hi"}]),
        ({"role": "tool", "content": "4", "name": "add"}, [{"role": "tool", "name": "add", "content": "4"}]),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], ["a", "b"]),
        ([{"type": "text", "text": "a"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}]),
        ([], []),
    ],
)
def test_observation_becomes_messages(observation: Any, messages: Any) -> None:
    expected = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    assert answer_of(observation, "s", 0, 100).messages == expected


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (
            None,
            "step() returned a NoneType as the observation: None; return a text, a message, a list of messages, or a ",
        ),
        (b"x", "step() returned a bytes as the observation"),
        ("\udcff", "step() returned a text that is not UTF-8: surrogates not allowed at character 0"),
        ("x" * 101, "step() returned an observation of 101 bytes; environment.max_observation_bytes is 100"),
        (
            {"role": "root", "content": ""},
            "step() returned a message with role 'root'; roles are user, tool, system, as",
        ),
        (
            {"role": "user", "content": 3},
            "step() returned a message with content 3; content is a text or a list of par",
        ),
        (
            {"role": "user", "content": "", "x": object},
            "step() returned <class 'object'> within an observation; use te",
        ),
        (Step("a", reward=float("nan")), "step() returned reward nan; return a finite number of at most 1e+30"),
        (Step("a", reward="1"), "step() returned reward '1'; return a finite number of at most 1e+30"),  # type: ignore[arg-type]
        (Step("a", reward=10**400), "step() returned reward 1000"),
        (Step("a", reward=1e31), "step() returned reward 1e+31; return a finite number of at most 1e+30"),
        (Step("a", metrics={"of picks": 1}), "step() returned a metric 'of picks'; its name has at most 48 characters"),
        (Step("a", metrics={"m" * 49: 1}), "step() returned a metric 'mmm"),
        (Step("a", done=1), "step() returned Step(done=1); done is True or False"),  # type: ignore[arg-type]
        (
            Step("a", metrics={"m": float("inf")}),
            "step() returned metric 'm' inf; return a finite number of at most 1e+30",
        ),
        (Step("a", metrics=3), "step() returned metrics 3; return a dict of at most 64 numbers"),  # type: ignore[arg-type]
    ],
)
def test_wrong_result_is_named(result: Any, error: str) -> None:
    with pytest.raises(EnvironmentFaultError, match=f"^{re.escape(error)}"):
        answer_of(result, "s", 0, 100)


def test_wrong_state_is_named() -> None:
    with pytest.raises(EnvironmentFaultError, match=r"^state\(\) returned a str; .*1048576 bytes"):
        checked_state("text")


class NoStep(Environment):
    def reset(self, task: Any, rng: Any) -> str:
        return ""


class WithoutRestore(Environment):
    def reset(self, task: Any, rng: Any) -> str:
        return ""

    def step(self, action: str) -> str:
        return ""

    def state(self) -> bytes:
        return b""


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        (f"{SUPPORT}.GuessNumber", {"limit": "x"}, "environment.options.limit: Input should be a valid integer"),
        (f"{SUPPORT}.GuessNumber", {"limti": 3}, "environment.options.limti: unknown option of GuessNumber; did you "),
        (f"{SUPPORT}.Guess", {}, f"environment.name = '{SUPPORT}.Guess': module {SUPPORT} ("),
        ("no.such.Game", {}, "environment.name = 'no.such.Game': module no not found"),
        (f"{SUPPORT}.np", {}, f"environment.name = '{SUPPORT}.np' names <module 'numpy'"),
        (f"{__name__}.NoStep", {}, f"environment.name = '{__name__}.NoStep': NoStep does not define step"),
        (f"{__name__}.WithoutRestore", {}, f"environment.name = '{__name__}.WithoutRestore': WithoutRestore defines s"),
    ],
)
def test_unusable_environment_is_refused_before_the_run(name: str, options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}"):
        load_environment(EnvironmentSection(name=name, options=options))


@pytest.fixture(scope="module")
def misbehaving() -> Iterator[Forks]:
    forks = Forks(EnvironmentSection(name=f"{SUPPORT}.Misbehaving", memory_limit_mib=512))
    yield forks
    forks.close()


async def play(forks: Forks, name: str, actions: list[str], **settings: Any) -> list[EnvironmentAnswer]:
    """Play one session until its first failure."""
    host = SessionHost(EnvironmentSection(name=f"{SUPPORT}.{name}", **settings), forks)
    answers = [await host.open(Open("s", {}, 0), "rollout.0#1")]
    for turn, action in enumerate(actions):
        answers.append(await host.act(Act("s", turn, action), "rollout.0#1"))
    await host.end()
    return answers


@pytest.mark.parametrize(
    ("action", "detail"),
    [
        ("raise", r"KeyError: 'no such move' \(.*environments.py, line \d+\)"),
        ("exit", r"SystemExit: enough \(.*environments.py, line \d+\)"),
        ("hang", r"no answer within environment.step_seconds = 0.5"),
        ("crash", r"its process was killed by SIGSEGV"),
        ("kill", r"its process was killed by SIGKILL"),
        ("garbage", r"its process wrote something else than an answer: .*"),
        ("nan", r"step\(\) returned reward nan; return a finite number of at most 1e\+30"),
        ("utf8", r"step\(\) returned a text that is not UTF-8: surrogates not allowed at character 0"),
        ("large", r"step\(\) returned an observation of 2097152 bytes; environment.max_observation_bytes is 1048576"),
    ],
)
def test_failure_of_an_environment_is_the_answer(misbehaving: Forks, action: str, detail: str) -> None:
    *_, last = asyncio.run(play(misbehaving, "Misbehaving", ["", action], step_seconds=0.5))
    assert (last.turn, last.error) == (1, "environment")
    assert re.fullmatch(detail, last.detail), last.detail


def test_session_after_its_failure_is_lost(misbehaving: Forks) -> None:
    *_, failed, after = asyncio.run(play(misbehaving, "Misbehaving", ["raise", "ok"]))
    assert (failed.error, after.error, after.detail) == ("environment", "lost", "the session has failed")


def test_repeated_turn_gets_the_same_answer() -> None:
    async def repeat() -> None:
        forks = Forks(EnvironmentSection(name=f"{SUPPORT}.Echo"))
        host = SessionHost(EnvironmentSection(name=f"{SUPPORT}.Echo"), forks)
        await host.open(Open("s", {}, 0), "a")
        first = await asyncio.gather(*(host.act(Act("s", 0, "pause:0.2"), "a") for _ in range(3)))
        assert first[0] == first[1] == first[2]
        assert first[0].messages[0]["content"].endswith(" 1")
        assert (await host.act(Act("s", 0, "other"), "a")) == first[0]
        assert (await host.act(Act("s", 2, "later"), "a")).detail == "the session is at turn 0"
        assert (await host.act(Act("s", 1, "foreign"), "b")).detail == "this actor has no such session"
        host.sweep(idle_seconds=0)
        assert host.count == 0
        await host.end()
        forks.close()

    asyncio.run(repeat())


def test_state_is_restored() -> None:
    async def restore() -> None:
        section = EnvironmentSection(name=f"{SUPPORT}.AsyncCounter")
        forks = Forks(section)
        host = SessionHost(section, forks)
        await host.open(Open("s", {}, 0), "a")
        for turn in range(3):
            answer = await host.act(Act("s", turn, ""), "a")
        again = await host.open(Open("s", {}, 0, answer.state, [""] * 3), "a")
        assert (again.turn, again.state, host.replayed) == (2, b"3", 0)
        assert (await host.act(Act("s", 3, ""), "a")).messages == [{"role": "user", "content": "4"}]
        await host.end()
        forks.close()

    asyncio.run(restore())


ACTOR = """
import asyncio, sys
from relax_actors.config.environment import EnvironmentSection
from relax_actors.envs.forks import Forks
from relax_actors.envs.host import SessionHost
from relax_actors.messages import Act, Open

async def main():
    section = EnvironmentSection(name="tests.support.environments.Echo")
    host = SessionHost(section, Forks(section))
    await host.open(Open("s", {}, 0), "a")
    answer = await host.act(Act("s", 0, "a"), "a")
    print(answer.messages[0]["content"].split()[1], flush=True)
    await host.act(Act("s", 1, "pause:1000"), "a")

asyncio.run(main())
"""


def test_sessions_end_with_a_killed_actor() -> None:
    with subprocess.Popen([sys.executable, "-c", ACTOR], stdout=subprocess.PIPE, cwd=ROOT) as actor:
        assert actor.stdout is not None
        pid = int(actor.stdout.readline())
        assert _is_alive(pid)
        actor.kill()
    wait_until(lambda: not _is_alive(pid), "end of the session")


def _children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("action", ["child", "daemon"])
def test_processes_that_an_environment_left_behind_end_with_its_session(action: str) -> None:
    async def leave() -> tuple[int, int]:
        section = EnvironmentSection(name=f"{SUPPORT}.Leaves")
        forks = Forks(section)
        host = SessionHost(section, forks)
        await host.open(Open("s", {}, 0), "a")
        answer = await host.act(Act("s", 0, action), "a")
        left = int(answer.messages[0]["content"])
        assert _is_alive(left)
        host.close("s", "a")
        await host.closed()
        alive = _is_alive(left)
        await host.end()
        forks.close()
        return left, alive

    left, alive = asyncio.run(leave())
    assert not alive, left


def test_session_that_is_closed_while_its_process_starts_leaves_none() -> None:
    async def close() -> None:
        section = EnvironmentSection(name=f"{SUPPORT}.Echo")
        forks = Forks(section)
        host = SessionHost(section, forks)
        opening = asyncio.ensure_future(host.open(Open("s", {}, 0), "a"))
        for _ in range(3):  # until it waits for a process
            await asyncio.sleep(0)
        assert host.count == 1
        host.close("s", "a")
        assert (await opening).detail == "the session has been closed"
        # Its process takes the next session.
        await host.open(Open("t", {}, 0), "a")
        first = await host.act(Act("t", 0, "a"), "a")
        assert first.messages[0]["content"].startswith("a ")
        assert _children_of(forks.pid) == [first.messages[0]["content"].split()[1]]
        await host.end()
        forks.close()

    asyncio.run(close())
