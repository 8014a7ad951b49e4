"""Tokens of the gateway and of its sessions, and what agents are given, searched in every file, message and process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from relax_actors.serving.tokens import session_token
from tests.security.test_secrets import holders
from tests.support.gateways import AGENTS, address_of
from tests.support.running import Run, wait_until

MakeRun = Callable[..., Run]
GIVEN = "given-3f81ac"
OPERATOR = "operator-90d2be"
PROGRAM = """
import json, os, urllib.request
assert "OPERATOR_TOKEN" not in os.environ
ask = {"messages": [{"role": "user", "content": "say 7"}]}
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
for stream in (False, True):
    body = json.dumps(ask | {"stream": stream}).encode()
    print(urllib.request.urlopen(urllib.request.Request(url, body, head)).read())
wrong = urllib.request.Request(url, b"{", head)
try:
    urllib.request.urlopen(wrong)
except urllib.error.HTTPError as error:
    print(error.read())
json.dump({"reward": 0.5}, open(os.environ["RELAX_RESULT_FILE"], "w"))
"""


def shown(secrets: list[str], agent: str) -> set[str]:
    """Command lines of processes, other than those of agents, that show a secret in themselves or their environment."""
    found = set()
    for path in Path("/proc").iterdir():
        try:
            command, environment = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if not command:
            continue  # a process before its program is loaded, or after its end
        is_agent = agent.encode() in command and b"actor_process" not in command and b"cli.main" not in command
        if any(s.encode() in command or (not is_agent and s.encode() in environment) for s in secrets):
            found.add(command.replace(b"\0", b" ").decode())
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tokens_of_sessions_are_in_the_environment_of_their_agents_only(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPERATOR_TOKEN", OPERATOR)
    agent = tmp_path / "agent.py"
    agent.write_text(PROGRAM)
    settings = [
        f'agent.command=["{sys.executable}", "-S", "{agent}"]',
        f'agent.environment={{GIVEN = "{GIVEN}"}}',
        "reward.function=environment",
        "run.steps=100000",
    ]
    run = make_run("agents", *settings, config=AGENTS).start()
    root = run.folder.root
    url, token = address_of(run)
    secret = (root / "store" / "gateway" / "secret").read_text()
    folder = root / "agents"
    looked = 0

    def enough() -> bool:
        nonlocal looked
        sessions = [path.name for path in folder.glob("*")] if folder.exists() else []
        tokens = [session_token(secret, name) for name in sessions]
        assert shown([secret, token, OPERATOR, *tokens], str(agent)) <= {operator}
        looked += bool(tokens)
        return looked > 20 and len(tokens) > 12

    assert run.process is not None
    operator = Path(f"/proc/{run.process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    wait_until(enough, "agents", 300)
    refused = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {token}x"}, timeout=10)
    assert token not in refused.text
    sessions = [path.name for path in folder.glob("*")]
    tokens = [session_token(secret, name) for name in sessions]
    run.disconnect()
    run.process.send_signal(signal.SIGTERM)
    code, _, said = run.finish(60)
    assert code == 0, said
    assert not any(one in said for one in (secret, token, OPERATOR, *tokens))
    # The streams of the broker, with all events and the table, are files of the run.
    assert holders(root, [OPERATOR, *tokens]) == set()
    assert holders(root, [secret]) == {"store/gateway/secret"}
    assert holders(root, [token]) == {"gateway/token"}
    assert {(root / name).stat().st_mode & 0o777 for name in ("gateway/token", "store/gateway/secret")} == {0o600}
