"""Commands that read a run which other machines or containers run: the broker's name and keys may be unknown here."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from broker.address import Address
from broker.connection import Connection
from relax_actors.config import load_config
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.streams import ensure_run_streams, publish_run
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.messages import assert_says
from tests.support.running import TINY, relax_here

RUN = "faraway"
HOST = "broker-of-containers.invalid"
VERBS = (
    ["status", RUN],
    ["tree", RUN],
    ["ledger", RUN],
    ["quarantine", "list", RUN],
    ["quarantine", "show", RUN, "group.0.0"],
    ["quarantine", "requeue", RUN, "--all"],
    ["scale", RUN, "rollout=2"],
    ["tail", f"relax.{RUN}.event.>", "--history"],
)


@dataclass
class Elsewhere:
    """A run whose broker was recorded as containers see it."""

    guarded: Guarded
    cwd: Path

    def record(self, *settings: str, credentials: str | None = "/keys.invalid", host: str = HOST) -> None:
        """Write the run's folder as `relax up` does in a container."""
        url = f"nats://{host}:4222"
        config = load_config(TINY, [f"run.name={RUN}", f"broker.url={url}", *settings])
        folder = RunFolder(self.cwd / "runs" / RUN)
        folder.root.mkdir(parents=True, exist_ok=True)
        folder.save_config(config, "/data/examples/demo")
        Address(url, credentials=credentials).save(folder.address)

    @property
    def published(self) -> str:
        return f"nats://127.0.0.1:{self.guarded.port}"

    def error_of(self, code: int, *arguments: str) -> str:
        """Run a command that must fail with an exit code; return its whole output."""
        done = relax_here(*arguments, cwd=self.cwd)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        return done.stderr


@pytest.fixture
def elsewhere(make_guarded: MakeGuarded, tmp_path: Path) -> Elsewhere:
    """A run with a table that is empty, at a server with credentials."""
    guarded = make_guarded([f"run.name={RUN}"])
    guarded.make()
    guarded.start()
    found = Elsewhere(guarded, tmp_path)
    found.record()
    config = load_config(TINY, [f"run.name={RUN}"])
    with closing(Connection(guarded.address("operator"), "root")) as connection:
        state = connection.call(ensure_run_streams(connection, config), 20)
        connection.call(publish_run(state, config, ""), 20)
    return found


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_unknown_host_name_is_reported_with_the_option_to_pass(elsewhere: Elsewhere, verb: list[str]) -> None:
    assert_says(elsewhere.error_of(2, *verb), f"nats://{HOST}:4222", RUN, repr(HOST), "--broker")


@pytest.mark.parametrize(
    ("verb", "user", "service"), [("ledger", "operator", "prompts"), ("monitor", "observer", "monitor")]
)
def test_missing_credentials_are_reported_with_the_command_that_copies_them(
    elsewhere: Elsewhere, verb: str, user: str, service: str
) -> None:
    elsewhere.record(f"broker.published={elsewhere.published}")
    assert_says(
        elsewhere.error_of(2, verb, RUN),
        RUN,
        "/keys.invalid",
        repr(user),
        f"docker compose cp {service}:/keys/{user} keys",
        "--credentials keys",
    )


def test_published_address_is_used_where_the_name_is_unknown(elsewhere: Elsewhere) -> None:
    elsewhere.record(f"broker.published={elsewhere.published}")
    done = relax_here("ledger", RUN, "--credentials", str(elsewhere.guarded.keys), cwd=elsewhere.cwd)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the ledger is complete\n")


@pytest.mark.slow
def test_address_and_credentials_of_one_user_are_enough_for_every_verb(elsewhere: Elsewhere) -> None:
    own = elsewhere.guarded.keys / "operator"
    given = ["--broker", elsewhere.published, "--credentials", str(own)]
    for verb in (["status", RUN], ["tree", RUN], ["tree", RUN, "--json"], ["ledger", RUN], ["quarantine", "list", RUN]):
        done = relax_here(*verb, *given, cwd=elsewhere.cwd)
        assert (done.returncode, done.stderr) == (0, ""), verb


@pytest.mark.slow
@pytest.mark.parametrize("verb", [["ledger", RUN], ["scale", RUN, "rollout=2"]], ids=" ".join)
def test_broker_that_does_not_answer_is_one_line(elsewhere: Elsewhere, verb: list[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        given = ["--broker", f"nats://127.0.0.1:{port}", "--credentials", str(elsewhere.guarded.keys)]
        assert_says(
            elsewhere.error_of(1, *verb, *given),
            f"nats://127.0.0.1:{port}",
            "within 5 s",
            "ConnectionRefusedError",
            "right address",
        )


@pytest.mark.slow
def test_credentials_of_another_broker_are_refused_in_one_line(elsewhere: Elsewhere, make_guarded: MakeGuarded) -> None:
    other = make_guarded([f"run.name={RUN}"])
    other.make()
    given = ["--broker", elsewhere.published, "--credentials", str(other.keys)]
    assert_says(
        elsewhere.error_of(1, "ledger", RUN, *given),
        elsewhere.published,
        f"{other.keys}/operator/nats.creds",
        "Authorization Violation",
    )


@pytest.fixture
def open_server(tmp_path: Path) -> Iterator[int]:
    """Port of a server that asks nobody for credentials, as another program may have started on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path / "open"
    (folder / "server").mkdir(parents=True)
    store = folder / "store"
    (folder / "server" / "nats-server.conf").write_text(
        f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{store}" }}\n'
    )
    server = Guarded(folder, port, [])
    server.start()
    yield port
    server.stop()


@pytest.mark.slow
def test_server_that_asks_for_no_credentials_is_not_the_broker(elsewhere: Elsewhere, open_server: int) -> None:
    elsewhere.record(f"broker.published=nats://127.0.0.1:{open_server}")
    assert_says(
        elsewhere.error_of(1, "ledger", RUN, "--credentials", str(elsewhere.guarded.keys)),
        f"nats://127.0.0.1:{open_server}",
        "no credentials",
        f"{elsewhere.guarded.keys}/operator/nats.creds",
    )


def test_nothing_is_created_on_a_server_that_has_another_run(address: Address, elsewhere: Elsewhere) -> None:
    given = ["--broker", address.url, "--credentials", str(address.credentials)]
    assert_says(elsewhere.error_of(2, "ledger", RUN, *given), address.url, f"no run {RUN!r}", "--broker", "relax up")


@pytest.mark.parametrize("url", ["nats://127.0.0.1:99999", "nats://:4222", "http://127.0.0.1:4222", "127.0.0.1"])
def test_invalid_address_is_reported(tmp_path: Path, url: str) -> None:
    done = relax_here("monitor", RUN, "--broker", url, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"relax: broker address {url!r} is invalid; write nats://host:port\n")
