"""Paths of [agent] and [gateway] follow the configuration's folder, and `relax check` names the missing ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relax_actors.checks import examine
from relax_actors.config import load_config
from tests.support.messages import assert_says
from tests.support.running import SUPPORT

PATHS = """
[agent]
command = ["./agent.sh"]
cwd = "work"
gateway_url = "https://other:1"
gateway_token_file = "theirs"

[gateway]
token_file = "tokens"
certificate = "cert.pem"
certificate_key = "key.pem"
"""


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with relative paths; the working directory is another folder."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(SUPPORT)])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = tmp_path / "run.toml"
    path.write_text((SUPPORT / "tiny_agents.toml").read_text().replace("[gateway]\n", "") + PATHS)
    return path


def test_relative_paths_follow_the_folder_of_the_configuration(config_file: Path) -> None:
    config, folder = load_config(config_file), config_file.parent
    assert config.agent is not None
    assert config.gateway is not None
    agent, gateway = config.agent, config.gateway
    assert (agent.command, agent.cwd, agent.gateway_token_file) == (
        [str(folder / "agent.sh")],
        folder / "work",
        folder / "theirs",
    )
    files = (gateway.token_file, gateway.certificate, gateway.certificate_key)
    assert files == (folder / "tokens", folder / "cert.pem", folder / "key.pem")
    named = load_config(config_file, ['agent.command=["python"]']).agent
    assert named is not None
    assert named.command == ["python"]


def test_missing_files_of_agents_and_the_gateway_are_named_one_after_the_other(config_file: Path) -> None:
    folder = config_file.parent

    def errors() -> tuple[str, ...]:
        return tuple(sorted(examine(load_config(config_file)).errors))

    token = f"gateway.token_file {folder / 'tokens'} cannot be read"
    first, second = errors()
    assert_says(first, f"agent.command '{folder / 'agent.sh'}' is no program", "PATH", "chmod +x")
    assert second.startswith(token)
    (folder / "agent.sh").write_text("#!/bin/sh\n")
    (folder / "agent.sh").chmod(0o755)
    (folder / "tokens").write_text("t" * 16)
    (folder / "tokens").chmod(0o600)
    first, second = errors()
    assert_says(first, f"agent.cwd {folder / 'work'} is no folder", "create it")
    assert_says(second, f"gateway.certificate {folder / 'cert.pem'} does not exist", "PEM")
    (folder / "work").mkdir()
    for name in ("cert.pem", "key.pem"):
        (folder / name).write_text("no certificate")
    first, second = errors()
    assert_says(first, f"agent.gateway_token_file {folder / 'theirs'} does not exist", "copy a token", "mode 600")
    words = (f"gateway.certificate {folder / 'cert.pem'}", "gateway.certificate_key", "PEM", "without a password")
    assert_says(second, *words)
