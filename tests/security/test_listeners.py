"""What a keyed server listens on, and how much of it one user may take."""

from __future__ import annotations

import re
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from broker import credentials
from broker.connection import Connection
from broker.errors import BrokerError
from broker.listeners import Settings
from relax_actors.cli.keys import make_keys
from relax_actors.errors import ConfigError
from tests.support.guarded import Guarded, MakeGuarded, free_port
from tests.support.messages import assert_says
from tests.support.running import TINY, wait_until
from tests.support.websockets import upgraded

RUN = "listening"


def listening(guarded: Guarded) -> set[str]:
    """Addresses on which a server listens, in hexadecimal, as the kernel lists them."""
    assert guarded.process is not None
    inodes = set()
    for path in Path(f"/proc/{guarded.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the server may close a file meanwhile
            inodes.add(str(path.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


def test_every_listener_is_on_the_host_of_listen(make_guarded: MakeGuarded) -> None:
    guarded = make_guarded([f"run.name={RUN}"])
    guarded.make(Settings(websocket=free_port(), http=free_port()))
    guarded.start()
    assert listening(guarded) == {"0100007F"}


def test_without_being_asked_there_is_one_listener_on_loopback(tmp_path: Path) -> None:
    lines = make_keys(str(TINY), tmp_path, [], Settings())
    text = (tmp_path / "server" / "nats-server.conf").read_text()
    assert re.findall(r"(?m)^ *(listen|http|websocket|port).*$", text) == ["listen"]
    assert 'listen: "127.0.0.1:4222"' in text
    assert_says(lines[-1], "other machines", "--listen 0.0.0.0:4222")


def test_pages_of_others_open_no_websocket(make_guarded: MakeGuarded) -> None:
    port = free_port()
    guarded = make_guarded([f"run.name={RUN}"])
    guarded.make(Settings(websocket=port))
    guarded.start()
    origins = [None, f"http://127.0.0.1:{port}", "http://127.0.0.1:1", "https://evil.invalid", "null"]
    assert [upgraded(port, origin) for origin in origins] == [True, True, False, False, False]


def test_only_named_pages_open_a_websocket(make_guarded: MakeGuarded) -> None:
    port = free_port()
    guarded = make_guarded([f"run.name={RUN}"])
    guarded.make(Settings(websocket=port, origins=("https://console.example", "http://127.0.0.1:9000")))
    guarded.start()
    origins = ["https://console.example", "http://127.0.0.1:9000", "http://console.example", f"http://127.0.0.1:{port}"]
    assert [upgraded(port, origin) for origin in origins] == [True, True, False, False]


def test_user_takes_no_more_than_its_connections_and_subscriptions(
    make_guarded: MakeGuarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(credentials, "MAX_SUBSCRIPTIONS", 20)
    guarded = make_guarded([f"run.name={RUN}"])
    guarded.make()
    guarded.start()
    with ExitStack() as opened:
        for n in range(8):
            opened.enter_context(closing(Connection(guarded.address("rollout"), f"rollout.{n}")))
        with pytest.raises(BrokerError):
            Connection(guarded.address("rollout"), "one too many", 2)
        trainer = opened.enter_context(closing(Connection(guarded.address("trainer"), "trainer")))

        async def subscribe() -> None:
            for _ in range(40):
                await trainer.nc.subscribe(f"relax.{RUN}.weights.*")

        trainer.call(subscribe(), 20)
        wait_until(lambda: "maximum subscriptions" in str(trainer.nc.last_error).lower(), "refusal")
    assert (credentials.MAX_CONNECTIONS, credentials.MAX_SUBSCRIPTIONS) == (8, 20)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"listen": "4222"}, "--listen '4222' is no HOST:PORT; write 127.0.0.1:4222, or 0.0.0.0:4222 for other"),
        ({"listen": "127.0.0.1:"}, "--listen '127.0.0.1:' is no HOST:PORT"),
        ({"listen": "127.0.0.1:0"}, "--listen '127.0.0.1:0' is no HOST:PORT"),
        ({"listen": "127.0.0.1:65536"}, "--listen '127.0.0.1:65536' is no HOST:PORT"),
        ({"listen": 'x"\nhttp: 1:4222'}, "is no HOST:PORT"),
        ({"listen": "127.0.0.1:٤٢"}, "is no HOST:PORT"),
        ({"websocket": -1}, "--websocket -1 is no port; give a number from 1 to 65535"),
        ({"http": 65536}, "--http 65536 is no port; give a number from 1 to 65535"),
        ({"cluster": ("a", "../../x")}, "--cluster '../../x' is no host name or address; use letters, digits, '-'"),
        ({"cluster": ("",)}, "--cluster '' is no host name"),
        ({"hosts": ("a\0b",)}, r"--host 'a\x00b' is no host name"),
        ({"hosts": ("é",)}, "--host 'é' is no host name"),
        ({"origins": ("*",)}, "--origin '*' is no origin of a page; write https://HOST or https://HOST:PORT"),
        ({"origins": ("https://a.example/path",)}, "--origin 'https://a.example/path' is no origin"),
        ({"origins": ("javascript:alert(1)",)}, "is no origin of a page"),
        ({"days": -1.0}, "--days -1 is no time to expire; give a number of days above 0, or leave it out"),
        ({"days": float("nan")}, "--days nan is no time to expire"),
        ({"days": 1e300}, "--days 1e+300 is no time to expire"),
    ],
)
def test_option_that_cannot_be_used_is_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**options)  # type: ignore[arg-type]
    assert said in str(caught.value)
