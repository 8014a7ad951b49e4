"""What a client does to the rows of a pool with the credentials of its role, or of a node, at a real server."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest

from broker.connection import Connection
from broker.permissions import OPERATOR
from broker.pull import Delivery, delivery_of, nak_deliveries
from broker.store import Store
from broker.subjects import RowId, Subjects
from broker.table import Table
from tests.support.fuzzing import samples
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.pool_clients import DELAY_FOR_GOOD, PoolClient, pool_client

RUN = "pools"
SUBJECTS = Subjects(RUN)
SETTINGS = [f"run.name={RUN}", "supervision.ack_wait=1"]
PROMPTS = [f"{RowId(0, index)}.prompt" for index in range(6)]
REFUSED_SECONDS = 3.0
"""Time without a delivery that is taken for none at all; several times `supervision.ack_wait`."""


@pytest.fixture
def guarded(make_guarded: MakeGuarded, tmp_path: Path) -> Guarded:
    """The server of a run with six rows that wait for a rollout."""
    found = make_guarded(SETTINGS)
    found.start_run()
    with closing(Connection(found.address(OPERATOR), "root")) as operator:
        table = Table(operator, SUBJECTS, Store(tmp_path / "store"), "test.0#1")
        table.put_all((f"{SUBJECTS.prefix}.{name}", samples()["prompt"]) for name in PROMPTS)
    return found


def client(guarded: Guarded, user: str) -> AbstractContextManager[PoolClient]:
    return pool_client(guarded, SUBJECTS, "rollout", user)


def returned_by(guarded: Guarded, user: str, deliveries: list[Delivery]) -> None:
    """Return deliveries to the pool of rollouts, as a node does for a dead actor."""
    with closing(Connection(guarded.address(user), user)) as connection:

        async def work() -> None:
            await nak_deliveries(connection, SUBJECTS.table_stream, "rollout", deliveries)
            await connection.nc.flush(5)

        connection.call(work(), 10)


def test_rows_that_a_client_took_and_left_go_to_others(guarded: Guarded) -> None:
    with client(guarded, "rollout") as thief:
        taken = thief.take(6)
        assert sorted(taken) == PROMPTS
        for _ in range(3):  # whoever returns a row at once may get it again
            thief.answer(next(iter(taken.values())), b"-NAK")
    with client(guarded, "rollout") as honest:
        assert sorted(honest.take(6)) == PROMPTS


@pytest.mark.slow
def test_row_that_a_client_put_off_stays_away_until_a_node_returns_it(guarded: Guarded) -> None:
    """The client chooses the delay, which outlives its connection; any sequence of the consumer returns the row."""
    with client(guarded, "rollout") as thief:
        taken = thief.take(6)
        thief.answer(taken[PROMPTS[0]], DELAY_FOR_GOOD)
    with client(guarded, "rollout") as honest:
        for message in honest.take(5).values():
            honest.connection.call(message.ack_sync(), 10)
        assert honest.take(1, REFUSED_SECONDS) == {}
        delivery = delivery_of(taken[PROMPTS[0]])
        assert delivery is not None
        returned_by(guarded, "node", [delivery._replace(consumer_sequence=1)])
        assert sorted(honest.take(1)) == PROMPTS[:1]


@pytest.mark.slow
@pytest.mark.parametrize("user", ["node", "reward"])
def test_only_a_node_returns_the_rows_of_another_pool_and_nobody_takes_them(guarded: Guarded, user: str) -> None:
    with client(guarded, "rollout") as holder, client(guarded, "rollout") as other:
        taken = holder.take(6)
        for message in taken.values():
            holder.answer(message, DELAY_FOR_GOOD)
        with client(guarded, user) as attacker:
            assert attacker.take(1, REFUSED_SECONDS) == {}
            deliveries = [delivery for message in taken.values() if (delivery := delivery_of(message)) is not None]
            returned_by(guarded, user, deliveries)
        again = other.take(6, REFUSED_SECONDS)
    assert sorted(again) == (PROMPTS if user == "node" else [])
