"""What a role may store with its own credentials at a real server, and who removes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from nats.js.errors import APIError

from broker.codec import MAX_CELL_BYTES, encode
from broker.connection import Connection
from broker.errors import BrokerError
from broker.leases import RunState
from broker.permissions import OPERATOR
from broker.pull import PullSubscription
from broker.store import Store
from broker.streams import open_bucket
from broker.subjects import RowId, Subjects
from broker.table import Table, publish
from relax_actors.messages import Checkpoint, Evaluation, RowCounts, Weights
from relax_actors.training.collector import Collector
from tests.support.contexts import context_of
from tests.support.faults import log_of
from tests.support.fuzzing import samples
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.running import wait_until

RUN = "quota"
SETTINGS = [
    f"run.name={RUN}",
    "eval.data.kind=python",
    "eval.data.function=tiny_tasks.make",
    "broker.max_bytes=67108864",
    "run.steps=40",
]
SUBJECTS = Subjects(RUN)
ADMITTED = [RowId(0, index) for index in range(4)]


@pytest.fixture
def guarded(make_guarded: MakeGuarded) -> Guarded:
    found = make_guarded(SETTINGS)
    found.start_run()
    return found


def table_of(connection: Connection, folder: Path) -> Table:
    return Table(connection, SUBJECTS, Store(folder / "store"), "test.0#1")


@pytest.fixture
def collector(guarded: Guarded, tmp_path: Path) -> Iterator[Collector]:
    """The collector of a run that has published weights 0 and admitted step 0."""
    with (
        closing(Connection(guarded.address("trainer"), "trainer")) as connection,
        closing(Connection(guarded.address("prompts"), "prompts")) as prompts,
    ):
        table = table_of(connection, tmp_path)
        table.put(SUBJECTS.numbered("weights", 0), Weights(0, "f" * 32, [], 1))
        table_of(prompts, tmp_path).put_all((SUBJECTS.cell(row, "prompt"), samples()["prompt"]) for row in ADMITTED)
        yield Collector(
            context_of(table, tmp_path, "trainer", tuple(SETTINGS), 1),
            ("rollout", "trainer"),
            {"evaluation": Evaluation},
        )


def strays() -> list[str]:
    prefix, far = SUBJECTS.prefix, 10**17
    steps = [f"{prefix}.group.{step}.{index}.trajectory" for step in (9, 10**6, far) for index in (0, far)]
    rows = [f"{prefix}.group.1.{index}.trajectory" for index in range(300)]
    ends = [f"{prefix}.group.{step}.0.quarantined" for step in range(7, 300)]
    evals = [f"{prefix}.eval.{version}.{index}.trajectory" for version in (0, 3, 77) for index in (0, 5, far)]
    return [*steps, *rows, *ends, *evals, f"{prefix}.group.x.0.trajectory", f"{prefix}.group.01.0.trajectory"]


def flood(connection: Connection, subjects: list[str], cell: bytes) -> int:
    """Write a cell on every subject; return how many the server stored."""

    async def work() -> int:
        answers = [await publish(connection.requests, subject, cell) for subject in subjects]
        await asyncio.wait(answers)
        return sum(answer.exception() is None for answer in answers)

    return connection.call(work(), 60)


def test_trainer_removes_strays_of_a_role_and_nothing_else(
    guarded: Guarded, collector: Collector, tmp_path: Path
) -> None:
    with closing(Connection(guarded.address("rollout"), "rollout")) as rollout:
        own = [SUBJECTS.cell(row, "trajectory") for row in ADMITTED]
        assert flood(rollout, own, encode(samples()["trajectory"], "rollout.3#1")) == len(own)
        assert flood(rollout, strays(), encode({"x": 1}, "rollout.3#1")) == len(strays())
    collector.sweep()
    with closing(Connection(guarded.address(OPERATOR), "operator")) as operator:
        table = table_of(operator, tmp_path)
        left = {subject.removeprefix(f"{SUBJECTS.prefix}.") for subject in table.list_subjects(f"{SUBJECTS.prefix}.>")}
        assert left == {"weights.0", *(f"{row}.{column}" for row in ADMITTED for column in ("prompt", "trajectory"))}
        event = wait_until(lambda: log_of(table, "event.trainer.0.strays_removed"), "event")[0]
        assert (event["by"], event["cells"]) == ("rollout.3", len(strays()) - 2)


def test_rows_below_the_floor_go_in_bulk_and_consumers_miss_nothing(
    guarded: Guarded, collector: Collector, tmp_path: Path
) -> None:
    """A purge must not skip what a consumer has still to deliver, nor take rows that are needed or kept."""
    prefix, evaluated, quarantined = SUBJECTS.prefix, RowId(0, 0, "eval"), RowId(2, 1)
    rows = [RowId(step, index) for step in range(1, 30) for index in range(4)]
    with (
        closing(Connection(guarded.address("evaluator"), "evaluator")) as evaluator,
        closing(Connection(guarded.address("prompts"), "prompts")) as prompts,
        closing(Connection(guarded.address("rollout"), "rollout")) as rollout,
        closing(Connection(guarded.address("trainer"), "trainer")) as trainer,
    ):
        table_of(evaluator, tmp_path).put(SUBJECTS.cell(evaluated, "prompt"), samples()["prompt"])
        table_of(prompts, tmp_path).put_all((SUBJECTS.cell(row, "prompt"), samples()["prompt"]) for row in rows)
        own = [SUBJECTS.cell(row, "trajectory") for row in rows]
        flood(rollout, own, encode(samples()["trajectory"], "rollout.0#1"))
        flood(rollout, [SUBJECTS.cell(quarantined, "quarantined")], encode({"x": 1}, "rollout.0#1"))
        table = table_of(trainer, tmp_path)
        table.put(SUBJECTS.numbered("weights", 28), Weights(28, "f" * 32, [], 1))
        table.put(SUBJECTS.numbered("checkpoint", 28), Checkpoint(28, "f" * 32, "at", 28, RowCounts()))
        todo = collector.sweep()
        assert todo.bulk == (
            "group.*.0.>", "group.*.1.trajectory", "group.*.2.>", "group.*.3.>"
        )  # fmt: skip
        left = {RowId.parse(subject.removeprefix(f"{prefix}.").rpartition(".")[0]) for subject in own[-8:]}
        assert {subject.removeprefix(f"{prefix}.") for subject in table.list_subjects(f"{prefix}.group.>")} == {
            f"{quarantined}.prompt",
            f"{quarantined}.quarantined",
            *(f"{row}.{column}" for row in left for column in ("prompt", "trajectory")),
        }
        pending = [evaluated, quarantined, *left]
        pull = PullSubscription(rollout, SUBJECTS.table_stream, "rollout", 64, backlog=lambda: 0)

        async def take() -> list[str]:
            await pull.start()
            taken: list[str] = []
            while len(taken) < len(pending):
                taken += [message.subject for message in await pull.fetch(64, 10)]
            await pull.close()
            return taken

        assert sorted(rollout.call(take(), 60)) == sorted(SUBJECTS.cell(row, "prompt") for row in pending)


def test_a_full_table_takes_the_trainers_cells_after_one_sweep(
    guarded: Guarded, collector: Collector, tmp_path: Path
) -> None:
    with closing(Connection(guarded.address("rollout"), "rollout")) as rollout:
        large = encode({"x": b"x" * (MAX_CELL_BYTES - 1024)}, "rollout.0#1")
        subjects = [f"{SUBJECTS.prefix}.group.50.{index}.trajectory" for index in range(20)]
        assert flood(rollout, subjects, large) < len(subjects)
        flood(rollout, [f"{subject}s".replace("trajectorys", "dropped") for subject in subjects], large[: -(1 << 20)])
    collector.sweep()
    with closing(Connection(guarded.address("trainer"), "trainer")) as trainer:
        table = table_of(trainer, tmp_path)
        table.patience = 0.0
        assert table.put(SUBJECTS.numbered("batch", 0), samples()["batch"])
    with closing(Connection(guarded.address(OPERATOR), "operator")) as operator:
        table = table_of(operator, tmp_path)
        event = wait_until(lambda: log_of(table, "event.trainer.0.table_full"), "event")[0]
        assert event["percent"] > 90
        assert event["by"].startswith("rollout.0")


def test_a_flood_of_ends_beyond_what_is_listed_at_once_is_removed(
    guarded: Guarded, collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role may write ends of rows, and could hide strays behind more of them than the trainer lists."""
    monkeypatch.setattr("relax_actors.training.collector.MAX_LISTED", 50)
    monkeypatch.setattr("relax_actors.training.collector.MAX_LOOKUPS", 100)
    ends = [f"{SUBJECTS.prefix}.group.0.{1000 + 7 * index}.quarantined" for index in range(300)]
    own = SUBJECTS.cell(ADMITTED[0], "quarantined")
    with closing(Connection(guarded.address("rollout"), "rollout")) as rollout:
        assert flood(rollout, [own, *ends], encode({"x": 1}, "rollout.0#1")) == 301
        for _ in range(6):
            collector.sweep()
        assert table_of(rollout, tmp_path).list_subjects(f"{SUBJECTS.prefix}.group.*.*.quarantined") == [own]


def test_a_subject_with_wildcards_takes_no_cell_with_it(guarded: Guarded, collector: Collector, tmp_path: Path) -> None:
    """The server stores what is published on a filter, and a purge of that subject would remove all that it matches."""
    wild = [f"{SUBJECTS.prefix}.group.{row}.trajectory" for row in ("*.*", "*.0", "0.*", ">.0", "0.>", ">.>", "*.>")]
    own = [SUBJECTS.cell(row, "trajectory") for row in ADMITTED]
    with closing(Connection(guarded.address("rollout"), "rollout")) as rollout:
        cell = encode(samples()["trajectory"], "rollout.0#1")
        for subjects in (wild[:2], own, wild[2:]):
            assert flood(rollout, subjects, cell) == len(subjects)
        collector.sweep()
        left = table_of(rollout, tmp_path).list_subjects(f"{SUBJECTS.prefix}.group.*.*.trajectory")
    assert sorted(left) == own


def test_a_number_that_is_a_wildcard_takes_no_result_with_it(
    guarded: Guarded, collector: Collector, tmp_path: Path
) -> None:
    results = [SUBJECTS.numbered("evaluation", number) for number in ("*", 0)]
    with closing(Connection(guarded.address("evaluator"), "evaluator")) as evaluator:
        cell = encode(Evaluation(0, 1.0, 4, {}), "evaluator.0#1", subject=results[1])
        assert flood(evaluator, results, cell) == 2
        collector.sweep()
        assert table_of(evaluator, tmp_path).list_subjects(SUBJECTS.numbered("evaluation", "*")) == results[1:]


def test_nobody_but_the_trainer_removes_cells(guarded: Guarded, collector: Collector, tmp_path: Path) -> None:
    users = ("rollout", "reward", "advantages", "prompts", "evaluator", "node")

    def purge(user: str) -> None:
        with closing(Connection(guarded.address(user), user)) as attacker:
            for stream in (SUBJECTS.table_stream, f"KV_{SUBJECTS.state_bucket}", SUBJECTS.log_stream):

                async def attack(stream: str = stream) -> None:
                    await attacker.nc.publish(f"$JS.API.STREAM.PURGE.{stream}", b"")
                    await attacker.nc.publish(f"$JS.API.STREAM.MSG.DELETE.{stream}", json.dumps({"seq": 1}).encode())
                    await attacker.nc.flush(10)

                attacker.call(attack(), 20)
            with pytest.raises(BrokerError, match="no permission to publish to"):
                table_of(attacker, tmp_path).purge([f"{SUBJECTS.prefix}.>"])

    with closing(Connection(guarded.address(OPERATOR), "operator")) as operator:
        before = table_of(operator, tmp_path).fill()
        with ThreadPoolExecutor(len(users)) as threads:  # each waits for an answer that it may not get
            assert list(threads.map(purge, users)) == [None] * len(users)
        assert table_of(operator, tmp_path).fill() == before


def test_unknown_and_oversized_keys_are_forgotten(guarded: Guarded, collector: Collector) -> None:
    """The bucket holds the leases of all actors, so a role must not fill it."""
    prefix = f"$KV.{SUBJECTS.state_bucket}."
    with closing(Connection(guarded.address("rollout"), "rollout")) as rollout:
        state = RunState(rollout, rollout.call(open_bucket(rollout, SUBJECTS), 20))
        assert rollout.call(state.next_incarnation("rollout", 0), 10) == 1
        many = [f"{prefix}incarnation.rollout.{10**7 + n}" for n in range(100)]
        large = [f"{prefix}lease.rollout.{n}" for n in range(80)]

        async def write() -> list[str]:
            refused = []
            for key, size in [*((key, 10) for key in many), *((key, 1 << 20) for key in large)]:
                try:
                    await rollout.js.publish(key, b"x" * size)
                except APIError as error:
                    refused.append(str(error.description))
            return refused

        assert set(rollout.call(write(), 60)) == {"maximum bytes exceeded"}
        collector.sweep()
        assert rollout.call(state.incarnations("rollout", 0), 10) == 1
        assert rollout.call(state.forged_leases(), 10) == {}
        info = rollout.call(rollout.js.stream_info(f"KV_{SUBJECTS.state_bucket}"), 10)
        assert info.state.messages == 1


@pytest.mark.slow
def test_keys_of_one_role_do_not_fill_the_bucket(guarded: Guarded, collector: Collector) -> None:
    """Neither with keys that actors could have, nor with wildcards, whose purge would remove those of honest actors."""
    prefix = f"$KV.{SUBJECTS.state_bucket}."
    with closing(Connection(guarded.address("rollout"), "rollout")) as rollout:
        state = RunState(rollout, rollout.call(open_bucket(rollout, SUBJECTS), 20))
        assert [rollout.call(state.next_incarnation("rollout", 7), 10) for _ in range(3)] == [1, 2, 3]
        odd = ["failure.rollout.>", "failure.rollout", "failure.rollout.group.0", "failure.rollout.group.0.x.y"]
        assert flood(rollout, [prefix + key for key in odd], b"x") == 0
        wild = [f"incarnation.rollout.{token}" for token in "*>"] + [
            f"failure.rollout.group.0.{token}" for token in "*x"
        ]
        leases = [f"lease.rollout.{n}" for n in range(1000, 3200)]
        assert flood(rollout, [prefix + key for key in wild], b"x" * (100 << 10)) == len(wild)
        for start in range(0, len(leases), 200):
            flood(rollout, [prefix + key for key in leases[start : start + 200]], b"x" * (31 << 10))
        with pytest.raises(APIError, match="maximum bytes exceeded"):
            rollout.call(rollout.js.publish(f"{prefix}lease.rollout.9", b"x" * (1 << 18)), 10)
        for _ in range(2):
            collector.sweep()
        info = rollout.call(rollout.js.stream_info(f"KV_{SUBJECTS.state_bucket}"), 10)
        assert info.state.messages == 3
        assert rollout.call(state.incarnations("rollout", 7), 10) == 3
