"""WebSocket of an embedded broker: observers watch with any NATS client, pages of others and other users do not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from broker.connection import Connection
from broker.permissions import OPERATOR
from broker.server import Server, ServerSettings
from broker.server_keys import Users
from broker.subjects import RowId, Subjects
from relax_actors.checks.machine import check_broker
from relax_actors.config import load_config
from relax_actors.errors import ConfigError
from relax_actors.roles.permissions import permissions, users
from relax_actors.runtime.journal import Journal
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.guarded import free_port
from tests.support.running import TINY
from tests.support.websockets import upgraded

RUN = "seen"
needs_aiohttp = pytest.mark.skipif(find_spec("aiohttp") is None, reason="needs aiohttp (pip install aiohttp)")
PAGE = "http://127.0.0.1:9000"
# A process of its own: this one may have imported nats-py without its WebSocket transport.
CLIENT = """
import asyncio, json, sys, nats
url, credentials, cell = sys.argv[1:]
async def main():
    problems, first = [], asyncio.get_running_loop().create_future()
    async def failed(error): problems.append(str(error))
    async def take(message): first.done() or first.set_result(message.subject)
    try:
        client = await nats.connect(url, user_credentials=credentials, error_cb=failed, allow_reconnect=False)
    except Exception as error:
        return print(json.dumps({"refused": str(error) or type(error).__name__}), flush=True)
    await client.subscribe("relax.seen.>", cb=take)
    await client.flush()
    print("ready", flush=True)
    subject = await asyncio.wait_for(first, 30)
    for refused in (cell, "$JS.API.STREAM.PURGE.RELAX_seen_TABLE", "relax.seen.event.trainer.0.finished"):
        await client.publish(refused, b"{}")
        await client.flush()
    await client.close()
    print(json.dumps({"subject": subject, "problems": problems}), flush=True)
asyncio.run(main())
"""


class Watchable:
    """An embedded broker of a run with a WebSocket port."""

    def __init__(self, folder: Path) -> None:
        self.config = load_config(TINY, [f"run.name={RUN}", f"run.folder={folder}"])
        self.port = free_port()
        granted = {user: permissions(self.config, user) for user in users(self.config)}
        settings = ServerSettings(websocket=self.port, origins=(PAGE,))
        self.server = Server(folder / "broker", settings, Users(RUN, granted))
        self.address = self.server.start()
        self.connection = Connection(self.address, "root")
        self.connection.call(ensure_run_streams(self.connection, self.config), 60)

    def client(self, user: str) -> subprocess.Popen[str]:
        """Start a client that watches over WebSocket, and tries to write."""
        credentials = self.server.keys / user / "nats.creds"
        cell = Subjects(RUN).cell(RowId(0, 0), "prompt")
        command = [sys.executable, "-c", CLIENT, f"ws://127.0.0.1:{self.port}", str(credentials), cell]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def watchable(tmp_path: Path) -> Iterator[Watchable]:
    run = Watchable(tmp_path)
    yield run
    run.connection.close()
    run.server.stop()


@needs_aiohttp
def test_observer_watches_over_websocket_and_writes_nothing(watchable: Watchable) -> None:
    client = watchable.client("observer")
    assert client.stdout is not None
    line = client.stdout.readline()
    assert line == "ready\n", line
    journal = Journal(watchable.connection, Subjects(RUN), "trainer", 0)
    journal.metric({"kind": "step", "step": 0, "reward": 0.5})
    assert journal.flush(10)
    result = json.loads(client.communicate(timeout=60)[0])
    assert result["subject"] == f"relax.{RUN}.metric.trainer.0"
    assert len(result["problems"]) == 3
    assert all("permissions violation" in problem.lower() for problem in result["problems"])
    stored = watchable.connection.call(watchable.connection.js.stream_info(f"RELAX_{RUN}_TABLE"), 10)
    assert stored.state.messages == 0


@needs_aiohttp
def test_users_that_write_have_no_websocket(watchable: Watchable) -> None:
    for client in [watchable.client(user) for user in ("trainer", "rollout", OPERATOR)]:
        said = client.communicate(timeout=60)[0]
        assert "authorization" in json.loads(said)["refused"].lower()


def test_only_named_pages_open_a_websocket_of_an_embedded_broker(watchable: Watchable) -> None:
    origins = [None, PAGE, "http://localhost:9000", "https://evil.invalid", "null"]
    assert [upgraded(watchable.port, origin) for origin in origins] == [True, True, False, False, False]
    watchable.server.stop(0)  # killed; it comes back at the same port
    with closing(Connection(watchable.server.start(), "again")):
        assert upgraded(watchable.port, PAGE)
        assert not upgraded(watchable.port, "https://evil.invalid")


def test_embedded_broker_has_no_websocket_unless_set(tmp_path: Path) -> None:
    server = Server(tmp_path / "broker", users=Users.operator(RUN))
    server.prepare()
    assert "websocket" not in server.config.read_text()
    text = (server.keys / OPERATOR / "nats.creds").read_text()
    assert "nats" in text.lower()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["broker.websocket=0"], "websocket"),
        (["broker.websocket=8443", "broker.url=nats://127.0.0.1:4222"], "relax keys --websocket"),
        (['broker.origins=["http://127.0.0.1:9000"]'], "origins needs `websocket`"),
        (["broker.websocket=8443", 'broker.origins=["127.0.0.1"]'], "no origin of a page"),
    ],
)
def test_settings_of_websocket_are_checked(settings: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(TINY, settings)


def test_port_that_is_taken_is_named_before_anything_starts(watchable: Watchable, tmp_path: Path) -> None:
    config = load_config(TINY, [f"run.folder={tmp_path / 'other'}", f"broker.websocket={watchable.port}"])
    with pytest.raises(ConfigError, match=r"set broker\.websocket to another"):
        check_broker(config)
