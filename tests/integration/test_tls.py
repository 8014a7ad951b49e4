"""TLS of a real server: nobody talks in the clear, and certificates are asked for in their time."""

from __future__ import annotations

import gc
import socket
from pathlib import Path

import pytest

from broker.address import Address
from broker.connection import Connection
from broker.errors import BrokerError
from broker.listeners import Settings
from tests.integration.test_access import SETTINGS
from tests.support.guarded import MakeGuarded

# nats-py leaves the socket of a handshake that failed to the collector.
HANDSHAKE = "ignore:.*socket.*:pytest.PytestUnraisableExceptionWarning"


@pytest.mark.slow
@pytest.mark.filterwarnings(HANDSHAKE)
def test_with_tls_nobody_talks_in_the_clear(make_guarded: MakeGuarded) -> None:
    plain, secure = make_guarded(SETTINGS), make_guarded(SETTINGS)
    plain.make()
    plain.start()
    secure.make(Settings(tls=True))
    secure.start()
    Connection(secure.address("rollout"), "rollout").close()
    known = secure.address("rollout")
    # No authority to check the server by.
    bare = plain.keys / "bare.creds"
    bare.write_text(Path(known.credentials or "").read_text())
    with pytest.raises(BrokerError, match="certificate"):
        Connection(Address(known.url, credentials=str(bare)), "bare", 3)
    # In the clear: the server answers nothing but the end.
    with socket.create_connection(("127.0.0.1", secure.port), 5) as connection:
        lines = connection.makefile("rb")
        assert lines.readline().startswith(b"INFO ")
        connection.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
        assert b"PONG" not in lines.read()
    # And a client that was told to use TLS speaks to no server without.
    with pytest.raises(BrokerError, match="does not offer TLS"):
        Connection(Address(plain.address("rollout").url, credentials=known.credentials), "rollout", 2)
    gc.collect()


@pytest.mark.slow
@pytest.mark.filterwarnings(HANDSHAKE)
def test_mutual_tls_asks_for_a_certificate_in_its_time(make_guarded: MakeGuarded) -> None:
    secure = make_guarded(SETTINGS)
    secure.make(Settings(tls=True, mutual=True))
    secure.start()
    Connection(secure.address("rollout"), "rollout").close()
    own = secure.keys / "rollout"
    from broker.certificates import CertificatePair, issue

    ca = CertificatePair.load(secure.keys / "private" / "ca.pem", secure.keys / "private" / "ca-key.pem")
    issue(ca, "rollout", -1.0).save(own / "cert.pem", own / "key.pem")
    with pytest.raises(BrokerError):
        Connection(secure.address("rollout"), "expired", 2)
    for name in ("cert.pem", "key.pem"):
        (own / name).unlink()
    with pytest.raises(BrokerError):
        Connection(secure.address("rollout"), "none", 2)
    gc.collect()


def test_keys_without_tls_leave_nothing_that_asks_for_it(make_guarded: MakeGuarded) -> None:
    server = make_guarded(SETTINGS)
    server.make(Settings(tls=True, mutual=True))
    server.make(Settings(tls=True))
    assert not (server.keys / "rollout" / "cert.pem").exists()
    assert (server.keys / "rollout" / "ca.pem").exists()
    server.make()
    server.start()
    Connection(server.address("rollout"), "rollout").close()
