"""Streams of a run on a cluster that has too few servers, as one that starts has for a moment."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from broker.connection import Connection
from broker.errors import BrokerError
from broker.permissions import OPERATOR
from broker.streams import ensure_streams, log_spec
from broker.subjects import Subjects
from tests.support.clusters import SERVERS, Cluster

DEADLINE = 2.0


@pytest.mark.slow
def test_servers_that_are_missing_are_waited_for_until_the_deadline(tmp_path: Path) -> None:
    cluster = Cluster.at(tmp_path / "keys", ["run.name=guarded"])
    cluster.make()
    try:
        cluster.start()
        with closing(Connection(cluster.address(OPERATOR), "root")) as connection:
            connection.call(connection.retry(connection.js.account_info, "sign in", 20), 30)
            spec = log_spec(Subjects("guarded"), 1 << 20, 60.0, replicas=SERVERS + 2)
            began = time.monotonic()
            with pytest.raises(BrokerError, match=rf"{spec.name}: no suitable peers"):
                connection.call(ensure_streams(connection, [spec], DEADLINE), 30)
            assert time.monotonic() - began > DEADLINE
    finally:
        cluster.stop()
