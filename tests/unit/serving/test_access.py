"""Who may use the gateway: addresses that are refused, tokens that are too short or open to others."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from relax_actors.config import load_config
from relax_actors.config.gateway import AgentSection, GatewaySection
from relax_actors.errors import ConfigError
from relax_actors.serving.agent_process import AgentError, Program, read_result
from relax_actors.serving.listening import is_free, listen
from relax_actors.serving.tokens import is_any, load_or_create_secret, read_tokens, session_token
from tests.support.running import SUPPORT


def test_public_address_needs_a_token_and_tls() -> None:
    with pytest.raises(ValueError, match=r"other machines: set gateway\.token_file"):
        GatewaySection(host="0.0.0.0")  # noqa: S104 refused
    with pytest.raises(ValueError, match="come together; set both or none"):
        GatewaySection(certificate=Path("cert.pem"))
    assert GatewaySection(host="::1").host == "::1"
    GatewaySection(host="0.0.0.0", token_file=Path("t"), certificate=Path("c"), certificate_key=Path("k"))  # noqa: S104


def test_agent_is_a_command_or_a_function() -> None:
    with pytest.raises(ValueError, match=r"agent\.command and agent\.function exclude each other"):
        AgentSection(command=["true"], function="a.b")


def test_agents_play_an_environment_without_players_and_held_out_rows_have_the_reward_of_the_agent() -> None:
    more = ["agent.function=a.b", "eval.data.kind=python", "eval.data.function=tiny_tasks.questions"]
    config = load_config(SUPPORT / "tiny_agents.toml", more)
    assert config.eval is not None
    assert config.eval.reward == "environment"
    message = r"environment\.players is about episodes .* with \[agent\] .*; leave environment\.players out"
    with pytest.raises(ConfigError, match=message):
        load_config(
            SUPPORT / "tiny_agents.toml", [*more, "environment.name=tiny_pick.Pick", "environment.players=['a']"]
        )


def test_token_file_is_private_and_its_tokens_are_long(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("short\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=rf"^gateway\.token_file {path} .*mode 044"):
        read_tokens(path)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"at least 16 ASCII characters"):
        read_tokens(path)
    path.write_text("a" * 16 + "\n\n" + "b" * 20 + "\n")
    assert read_tokens(path) == ("a" * 16, "b" * 20)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tokens(tmp_path / "absent")


def test_all_processes_read_the_secret_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "gateway" / "secret"
    program = (
        "import sys, pathlib; from relax_actors.serving.tokens import load_or_create_secret as f;"
        "print(f(pathlib.Path(sys.argv[1])))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {process.communicate(timeout=60)[0].strip() for process in both}
    assert said == {load_or_create_secret(path)}
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["secret"]


def test_token_of_a_session_opens_no_other_session() -> None:
    tokens = {session_token("secret", f"group-0-0-{n}-0") for n in range(100)}
    assert len(tokens) == 100
    assert not is_any(session_token("other", "group-0-0-0-0"), tokens)
    assert is_any(session_token("secret", "group-0-0-0-0"), tokens)


def test_address_in_use_is_named() -> None:
    with closing(listen("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        with pytest.raises(ConfigError, match=rf"^gateway cannot listen on 127\.0\.0\.1:{port}: .*in use; set another"):
            listen("127.0.0.1", port, "gateway", "set another")


def test_result_of_an_agent_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert read_result(path).reward is None
    path.write_text('{"reward": 1, "metrics": {"tools": 2}}')
    assert (read_result(path).reward, read_result(path).metrics) == (1.0, {"tools": 2.0})
    for text in ('{"reward": NaN}', '{"reward": true}', "[]", "{", '{"metrics": {"a": "b"}}'):
        path.write_text(text)
        with pytest.raises(AgentError, match=r'^result\.json is not \{"reward": <number>, "metrics": '):
            read_result(path)


def test_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^agent\.command 'no-such-agent' is no program"):
        Program(["no-such-agent"], None, {}, 1).check()
    with pytest.raises(ConfigError, match=r"is no folder; create it"):
        Program([sys.executable], tmp_path / "absent", {}, 1).check()
    Program([Path(sys.executable).name], tmp_path, {"PATH": os.path.dirname(sys.executable)}, 1).check()  # noqa: PTH120
