"""Environments of other projects, with their real packages."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from relax_actors.config.environment import EnvironmentSection
from relax_actors.data.reasoning_gym import open_reasoning_gym
from relax_actors.data.source import SourceSettings
from relax_actors.envs.forks import Forks
from relax_actors.envs.host import SessionHost
from relax_actors.envs.loading import load_environment
from relax_actors.errors import ConfigError
from relax_actors.messages import Act, EnvironmentAnswer, Open
from tests.support.guarded import free_port
from tests.support.messages import assert_says
from tests.support.running import wait_until

ROOT = Path(__file__).parents[2]
TASK: dict[str, Any] = {"prompt": "", "answer": "", "metadata": {}}
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


def needs(package: str, install: str = "") -> pytest.MarkDecorator:
    """Skip tests of an optional package that is not installed; the reason says how to install it."""
    remedy = install or f"relax-actors[{package}]"
    return pytest.mark.skipif(find_spec(package) is None, reason=f"no package {package}; pip install '{remedy}'")


def play(section: EnvironmentSection, task: dict[str, Any], *actions: str, seed: int = 1) -> list[EnvironmentAnswer]:
    """Play an episode in its own process; return the answers to the reset and to the actions."""

    async def run() -> list[EnvironmentAnswer]:
        forks = Forks(section)
        host = SessionHost(section, forks)
        try:
            answers = [await host.open(Open("s", task, seed), "a")]
            answers += [await host.act(Act("s", turn, action), "a") for turn, action in enumerate(actions)]
            await host.end()
        finally:
            forks.close()
        return answers

    return asyncio.run(run())


def contents(answers: list[EnvironmentAnswer]) -> list[Any]:
    assert not any(answer.error for answer in answers), answers
    return [message["content"] for answer in answers for message in answer.messages]


@needs("gymnasium")
class TestGymnasium:
    def test_episode_is_played_by_text(self) -> None:
        section = EnvironmentSection(name="gymnasium", options={"id": "tests.support.gym_corridor:Corridor-v0"})
        start, wrong, moved, end = play(section, TASK, "fly", "1", "1")
        assert contents([start, wrong, moved]) == ["@..", "Error: 'fly' is no action; actions are 0, 1", ".@."]
        assert (moved.reward, end.reward, end.done) == (0.0, 1.0, True)

    def test_names_of_actions(self) -> None:
        options = {"id": "tests.support.gym_corridor:Corridor-v0", "actions": ["back", "on"]}
        *_, end = play(EnvironmentSection(name="gymnasium", options=options), TASK, "on", "back", "on", "on")
        assert end.done

    def test_truncation_is_no_end(self) -> None:
        options = {"id": "tests.support.gym_corridor:Corridor-v0", "kwargs": {"max_episode_steps": 2}}
        *_, end = play(EnvironmentSection(name="gymnasium", options=options), TASK, "0", "0")
        assert (end.done, end.truncated) == (False, True)

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"id": "No-v0"}, "environment.options.id = 'No-v0': Gymnasium does not make it: NameNotFound"),
            (
                {"id": "Pendulum-v1"},
                "environment.options.id = 'Pendulum-v1' has actions Box(-2.0, 2.0, (1,)",
            ),
            (
                {"id": "CartPole-v1", "actions": ["a"]},
                "environment.options.actions has 1 texts, and CartPole-v1 has 2",
            ),
        ],
    )
    def test_unusable_environment_is_refused(self, options: dict[str, Any], error: str) -> None:
        with pytest.raises(ConfigError, match=f"^{re.escape(error)}"):
            load_environment(EnvironmentSection(name="gymnasium", options=options))


@needs("mcp")
class TestMcp:
    STDIO = f"{sys.executable} -m tests.support.mcp_server"

    @pytest.fixture
    def url(self) -> Iterator[str]:
        port = free_port()
        command = [sys.executable, "-m", "tests.support.mcp_server", str(port)]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as server:
            wait_until(lambda: _listens(port), "the MCP server")
            yield f"http://127.0.0.1:{port}/mcp"
            server.terminate()

    def test_tools_over_http(self, url: str) -> None:
        section = EnvironmentSection(name="mcp", options={"servers": [url]})
        cls, options = load_environment(section)
        schemas = {tool["function"]["name"]: tool["function"] for tool in cls.tool_schemas(options)}
        assert schemas["price"]["description"] == "Price of an article."
        assert schemas["price"]["parameters"]["required"] == ["article"]
        calls = [CALL.format("price", '{"article": "bolt", "count": 2}'), CALL.format("price", '{"article": "nut"}')]
        _, *answers, end = play(section, TASK, *calls, CALL.format("photo", "{}"), "6")
        found = contents(answers)
        assert found[0] == "6"
        assert found[1] == "Error: Error executing tool price"
        assert found[2][0] == {"type": "image", "image": b"pixels"}
        assert end.done

    def test_tools_over_stdio(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        section = EnvironmentSection(name="mcp", options={"servers": [self.STDIO], "allow": ["price"]})
        _, answer = play(section, TASK, CALL.format("price", '{"article": "bolt"}'))
        assert contents([answer]) == ["3"]

    def test_absent_server_is_refused(self) -> None:
        url = f"http://127.0.0.1:{free_port()}/mcp"
        error = f"environment.options.servers: {url!r} does not answer: "
        with pytest.raises(ConfigError, match=f"^{re.escape(error)}"):
            load_environment(EnvironmentSection(name="mcp", options={"servers": [url]}))


def test_reasoning_gym_gives_several_attempts() -> None:
    source = open_reasoning_gym(SourceSettings(task="chain_sum", size=3, seed=1))
    task = source[0]
    plain = {"prompt": task.prompt, "answer": task.answer, "metadata": task.metadata}
    section = EnvironmentSection(name="reasoning_gym", options={"attempts": 2, "again": "No, {left} left."})
    _, wrong, right = play(section, plain, "<answer>x</answer>", f"<answer>{task.answer}</answer>")
    assert contents([wrong]) == ["No, 1 left."]
    assert (right.reward, right.done, right.metrics) == (1.0, True, {"attempts": 2.0})
    *_, last = play(section, plain, "x", "y")
    assert (last.reward, last.done) == (0.0, True)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@needs("openenv", install="openenv>=0.10")  # the server's package, in no extra: the adapter does without it
class TestOpenEnv:
    @pytest.fixture
    def url(self) -> Iterator[str]:
        port = free_port()
        command = [sys.executable, "-m", "tests.support.openenv_server", str(port)]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as server:
            wait_until(lambda: _listens(port), "the OpenEnv server", 60)
            yield f"http://127.0.0.1:{port}"
            server.terminate()

    def test_episode_over_websocket(self, url: str) -> None:
        section = EnvironmentSection(name="openenv", options={"url": url, "shown": "text"})
        task = TASK | {"metadata": {"reset": {"word": "now"}}}
        start, first, last = play(section, task, "one", "two")
        assert contents([start, first]) == ["begin now", "one 1"]
        assert [(answer.reward, answer.done) for answer in (first, last)] == [(0.5, False), (0.5, True)]

    def test_refused_action_is_an_error_of_the_sample(self, url: str) -> None:
        section = EnvironmentSection(name="openenv", options={"url": url, "field": ""})
        _, told, failed = play(section, TASK, "[1]", '{"volume": 3}')
        assert contents([told]) == ["Error: '[1]' is no JSON object; write the action as one"]
        assert failed.error == "environment"
        assert failed.detail.startswith("RuntimeError: the server refuses step: ")


@needs("websockets", install="relax-actors[openenv]")
def test_absent_openenv_server_is_an_error_of_the_sample() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    (answer,) = play(EnvironmentSection(name="openenv", options={"url": url}), TASK)
    assert (answer.error, answer.turn) == ("environment", -1)
    assert answer.detail.startswith("OSError: ") or "Connect" in answer.detail
    with pytest.raises(ConfigError) as error:
        load_environment(EnvironmentSection(name="openenv", options={"url": "localhost:8000"}))
    assert_says(error.value, "environment.options.url", "'localhost:8000'", "http://127.0.0.1:8000")
