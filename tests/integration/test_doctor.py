"""`relax doctor` says what is wrong with a run, read from a real broker, and with which exit code."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from broker.address import Address
from broker.codec import MAX_CELL_BYTES, encode
from broker.connection import Connection
from broker.leases import RunState
from broker.permissions import NODE, OPERATOR
from broker.streams import open_bucket
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.config.pools import RoleSection
from relax_actors.errors import ConfigError
from relax_actors.messages import Batch, Quarantined, Redelivery, Weights
from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.examination import connected_by_address, examine, operator_of
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.streams import ensure_run_streams, fetch_run_record, publish_run
from tests.support.gateways import AGENTS
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.messages import assert_says
from tests.support.running import TINY, Run, relax, wait_until

RUN = "patient"
SUBJECTS = Subjects(RUN)
ROLES = ("prompts", "rollout", "reward", "advantages", "trainer")
TTL = 120.0


class Patient:
    """A run on a keyed server, without processes: what they would write is written by hand."""

    def __init__(self, guarded: Guarded, folder: Path) -> None:
        self.guarded = guarded
        self.config = load_config(TINY, [f"run.name={RUN}", f"run.folder={folder}", "broker.max_bytes=67108864"])
        self.connection = Connection(guarded.address(OPERATOR), "test")
        self.call = self.connection.call
        self.call(ensure_run_streams(self.connection, self.config), 60)
        self.state = RunState(self.connection, self.call(open_bucket(self.connection, SUBJECTS), 30))
        self.call(publish_run(self.state, self.config, str(TINY.parent)), 30)
        self.table = Table(self.connection, SUBJECTS, store_of(folder), "test.0#1")
        self.beat()

    def beat(self, **of_node: Any) -> None:
        """Write the leases of a root and its node, whose actors are ready."""
        now = time.time()
        child = {"phase": "ready", "since": now, "restarts": 0, "pid": 1}
        self.lease("node", 0, name="host", where="1", children={f"{role}.0": child for role in ROLES} | of_node)
        self.lease("root", 0, children={"broker": child, "node": child})

    def lease(self, role: str, n: int, **fields: Any) -> None:
        """Write a lease."""
        self.call(self.state.renew_lease(role, n, {"pid": 1, "since": time.time(), **fields}, TTL), 10)

    def step(self, age: float, number: int = 0) -> None:
        """Train a step `age` seconds ago."""
        self.table.put(SUBJECTS.numbered("batch", number), Batch([0], 0, 1, 0.5, 0, 1, time.time() - age))

    def findings(self) -> list[str]:
        name, address = operator_of(None, self.guarded.url, self.guarded.keys, None)
        with connected_by_address(name, address) as at:
            return [f"{'problem' if finding.is_problem else 'note'}: {finding.text}" for finding in examine(at)]


def store_of(folder: Path) -> Any:
    from broker.store import Store

    return Store(folder / "store")


@pytest.fixture
def patient(make_guarded: MakeGuarded, tmp_path: Path) -> Iterator[Patient]:
    guarded = make_guarded([f"run.name={RUN}", "broker.max_bytes=67108864"])
    guarded.make()
    guarded.start()
    found = Patient(guarded, tmp_path)
    yield found
    found.connection.close()


def test_healthy_run_has_no_findings(patient: Patient) -> None:
    assert patient.findings() == []


def test_dead_supervisors_and_absent_roles_are_named(patient: Patient) -> None:
    down = {"phase": "backing_off", "since": time.time(), "restarts": 4, "pid": None}
    patient.beat(**{"rollout.0": down})
    patient.lease("root", 1, children={})
    backing_off, no_lease = patient.findings()
    assert_says(backing_off, "problem: rollout.0", "backing off", "4 restarts", "logs/rollout.0.log")
    assert_says(no_lease, "problem: node 1 has no lease", "down or cut off", "after 4 s (supervision.ack_wait)")
    patient.call(patient.state.release_lease("root", 0), 10)
    patient.call(patient.state.release_lease("root", 1), 10)
    patient.lease("node", 0, name="host", where="1", children={"trainer.0": {"phase": "ready"}})
    first, second, *_ = patient.findings()
    assert_says(first, "problem: no `relax up` supervises run patient", "cut off", "start the same command again")
    assert_says(second, "problem: role reward has no actor", "needed by advantages", "relax node --role reward=1")


def test_missing_consumer_is_named(patient: Patient) -> None:
    patient.call(patient.connection.js.delete_consumer(SUBJECTS.table_stream, "reward"), 10)
    (found,) = patient.findings()
    assert_says(found, f"problem: consumer reward of stream {SUBJECTS.table_stream} is missing", "start it again")


def test_characters_that_the_tokenizer_lacks_are_counted_over_actors(patient: Patient) -> None:
    for role, n, escaped in (("rollout", 0, 390), ("rollout", 1, 8), ("gateway", 0, 0)):
        journal = Journal(patient.connection, SUBJECTS, role, n)
        for dropped in (1, 2):
            journal.metric({"rows": 1, "characters_escaped": escaped, "characters_dropped": dropped})
        journal.flush(10)
    (found,) = patient.findings()
    assert_says(found, "398 characters", "escaped", "6 left out")
    assert "model.tokenizer.alphabet" in found


OWN_ROLES = """
from relax_actors import Role, StatefulRole
from relax_actors.runtime.service_role import ServiceRole


class Shaped(Role):
    reads = ("trajectory",)
    writes = "shaped"

    def handle(self, row):
        return 0.0


class Counting(StatefulRole):
    def follows(self, config):
        return [f"relax.{config.run.name}.group.*.*.shaped"]


class Serving(ServiceRole):
    async def start(self):
        pass
"""


def test_roles_of_the_user_are_judged_without_their_classes(
    patient: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = {"shaped": "Shaped", "counting": "Counting", "serving": "Serving"}
    roles = {name: RoleSection(actor=f"own_roles_of_the_patient.{actor}") for name, actor in actors.items()}
    config = patient.config.model_copy(update={"roles": roles})
    (tmp_path / "own_roles_of_the_patient.py").write_text(OWN_ROLES)
    monkeypatch.syspath_prepend(tmp_path)
    patient.call(ensure_run_streams(patient.connection, config), 60)
    patient.call(publish_run(patient.state, config, str(TINY.parent)), 30)
    monkeypatch.undo()
    del sys.modules["own_roles_of_the_patient"]
    child = {"phase": "ready", "since": time.time(), "restarts": 0, "pid": 1}
    patient.beat(**{f"{name}.0": child for name in roles})
    patient.lease("root", 0, since=time.time() - 100, children={})
    assert patient.findings() == []
    for name in ("shaped", "counting@1"):
        patient.call(patient.connection.js.delete_consumer(SUBJECTS.table_stream, name), 10)
    found = patient.findings()
    assert [text.partition(" of stream ")[0] for text in found] == [
        "problem: consumer shaped",
        "problem: consumer counting@1",
    ]


def test_run_whose_broker_does_not_answer_is_not_said_to_be_down(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "hung")
    with closing(folder.lock()):
        folder.save_config(load_config(TINY, ["run.name=hung", f"run.folder={folder.root}"]), str(TINY.parent))
        Address("nats://127.0.0.1:1").save(folder.address)
        with pytest.raises(ConfigError) as refused, connected(str(folder.root)):
            pass
    assert_says(refused.value, "run hung is in use", "does not answer", "10 s (supervision.heartbeat)", "try again")


@pytest.mark.slow
def test_rows_that_nobody_fetches_are_counted(patient: Patient) -> None:
    patient.lease("rollout", 0, incarnation=1, rows=[], waits_for="its first row", doing_since=None)
    for n in range(2):
        patient.table.put_encoded([(SUBJECTS.cell(RowId(0, n), "prompt"), encode({}, "prompts.0#1"))])
    wait_until(patient.findings, "pending rows")
    assert patient.findings() == ["problem: 2 rows wait for rollout, and none of its actors fetches any"]


def test_stalled_run_tells_what_its_actors_wait_for(patient: Patient) -> None:
    patient.step(age=500)
    patient.lease("root", 0, children={}, since=time.time() - 600)
    patient.lease("trainer", 0, incarnation=1, rows=[], waits_for="column advantage", doing_since=None)
    stalled, *_, waits = patient.findings()
    assert stalled in (f"problem: no step for {n} s, at step 0 of 8" for n in range(500, 560))
    assert waits == "note: trainer.0: waiting for column advantage"


def test_run_that_was_started_again_is_healthy_before_its_next_step(patient: Patient) -> None:
    patient.step(age=86_400)
    assert [text for text in patient.findings() if "ledger" not in text] == []


def test_run_that_ends_after_its_last_step_is_not_stalled(patient: Patient) -> None:
    last = patient.config.run.steps - 1
    patient.step(500, last)
    patient.lease("root", 0, children={}, since=time.time() - 600)
    (found,) = (text for text in patient.findings() if "ledger" not in text)
    assert_says(found, "note: the last step was trained", "not over yet", "last checkpoint", "evaluates")


@pytest.mark.slow
def test_table_full_of_strays_is_named_with_the_role(patient: Patient) -> None:
    with closing(Connection(patient.guarded.address("rollout"), "rollout")) as rollout:
        table = Table(rollout, SUBJECTS, store_of(Path(patient.config.folder)), "rollout.0#1")
        large = encode({"x": b"x" * (MAX_CELL_BYTES - 1024)}, "rollout.0#1")
        table.put_encoded([(f"{SUBJECTS.prefix}.group.50.{n}.trajectory", large) for n in range(15)])
    full = round(100 * patient.table.fill().size / (1 << 26))
    assert patient.findings() == [f"problem: the table is {full} % full; raise broker.max_bytes"]
    with closing(Connection(patient.guarded.address("trainer"), "trainer")) as trainer:
        Journal(trainer, SUBJECTS, "trainer", 0).event("table_full", percent=full, max_bytes=1 << 26, by="rollout.0")
        wait_until(lambda: "strays" in str(patient.findings()), "the trainer's report")
    assert_says(patient.findings()[0], "problem: stalled", f"{full} % full of strays by rollout.0", "rotate its keys")


def test_quarantined_rows_and_a_broken_ledger_are_counted(patient: Patient) -> None:
    patient.table.put(SUBJECTS.numbered("weights", 0), Weights(0, "f" * 32, [], 1))
    for n in range(2):
        cell = Quarantined("reward", 3, f"ValueError: no number {n}", "Traceback")
        patient.table.put(SUBJECTS.cell(RowId(0, n), "quarantined"), cell)
    assert_says(
        "\n".join(patient.findings()),
        "2 rows",
        "quarantined in reward",
        "no number 1",
        "`relax quarantine list patient`",
    )


def test_role_that_took_rows_without_a_result_is_named(patient: Patient) -> None:
    rows = [RowId(0, 1), RowId(0, 2, "eval")]
    patient.table.put_all((SUBJECTS.cell(row, "redeliver-reward"), Redelivery("reward", 7)) for row in rows)
    (found,) = patient.findings()
    assert_says(found, "problem: role reward took 2 rows without writing its column", *map(str, rows))


def test_entry_that_is_no_lease_is_named(patient: Patient) -> None:
    with closing(Connection(patient.guarded.address(NODE), NODE)) as node:
        node.call(node.js.publish(f"$KV.{SUBJECTS.state_bucket}.lease.owner.trainer", b"{}"), 10)
    (found,) = patient.findings()
    assert found.startswith("problem: entry lease.owner.trainer is no lease and is ignored: ")


def test_finished_run_is_healthy_without_processes(patient: Patient) -> None:
    patient.call(patient.state.release_lease("root", 0), 10)
    patient.call(publish_run(patient.state, patient.config, str(TINY.parent), finished=True), 30)
    assert patient.findings() == []


@pytest.mark.slow
def test_exit_code_and_json_tell_the_same(patient: Patient, tmp_path: Path) -> None:
    access = ["--broker", patient.guarded.url, "--credentials", str(patient.guarded.keys)]
    done = relax("doctor", *access, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "run patient is healthy\n", "")
    patient.guarded.stop()
    done = relax("doctor", *access, "--json", cwd=tmp_path)
    assert done.returncode == 1
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["severity"] == "problem"
    problem = finding["text"]
    assert_says(problem, patient.guarded.url, "within 5 s", "right address")
    done = relax("doctor", "nothing", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert_says(done.stderr, "no run 'nothing'", "runs/nothing/config.json", "folder")


SCORED = "reward.function=environment"
EPISODES = ("environment.name=tiny_pick.Pick", "data.function=tiny_pick.make", SCORED, "rollout.max_tokens=2")
HELD_OUT = ("eval.rows=2", "eval.every=2", "eval.data.kind=python", "eval.data.size=4")
QUESTIONS = (*HELD_OUT, "eval.data.function=tiny_tasks.questions")
REFERENCE = ("roles.reference.actor=reference", "algorithm.kl.place=loss", "algorithm.kl.coefficient=0.1")
RUNS: dict[str, tuple[Path, tuple[str, ...], set[str]]] = {
    "agents": (AGENTS, ("agent.function=tiny_agents.play", SCORED, *QUESTIONS), {"agent", "gateway", "evaluator"}),
    "episodes": (TINY, (*EPISODES, *REFERENCE), {"environment", "reference"}),
    "critic": (TINY, ("algorithm.name=ppo", "critic.learning_rate=1e-3", "algorithm.kl.place=none"), {"critic"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_real_healthy_run_has_no_problems(make_run: Callable[..., Run], tmp_path: Path, name: str) -> None:
    config, settings, roles = RUNS[name]
    assert roles <= consumers_of_healthy(make_run(name, *settings, "run.steps=100000", config=config), tmp_path)


@pytest.mark.slow
def test_real_healthy_run_with_a_teacher_has_no_problems(make_run: Callable[..., Run], tmp_path: Path) -> None:
    other = make_run("other", "run.steps=1")
    other.complete()
    settings = (f"roles.teacher.model={other.folder.model}", "reward.function=tiny_tasks.share_of_sevens")
    run = make_run("taught", "algorithm.name=opd", *settings, "run.steps=100000")
    assert "teacher" in consumers_of_healthy(run, tmp_path)


def consumers_of_healthy(run: Run, cwd: Path) -> set[str]:
    """Start a run, check that doctor finds no problem, and return the roles whose consumers it looked at."""
    run.start()
    wait_until(lambda: run.table.get(f"relax.{run.name}.batch.3"), "batch.3", 240)
    done = relax("doctor", run.name, "--json", cwd=cwd)
    body = json.loads(done.stdout)
    assert (done.returncode, [each for each in body["findings"] if each["severity"] == "problem"]) == (0, []), body
    record = run.connection.call(fetch_run_record(state_of(run)), 10)
    assert record is not None
    return set(record.consumers)


def state_of(run: Run) -> RunState:
    return RunState(run.connection, run.connection.call(open_bucket(run.connection, Subjects(run.name)), 10))


@pytest.mark.slow
def test_run_that_stopped_is_told_from_one_that_is_up(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run("visited", "run.steps=2000").start()
    wait_until(lambda: run.table.get("relax.visited.batch.2"), "batch.2")
    done = relax("doctor", "visited", cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "run visited is healthy")
    run.disconnect()
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.finish(60)[0] == 0
    done = relax("doctor", "visited", cwd=tmp_path)
    assert done.returncode == 1
    first = done.stdout.splitlines()[0]  # notes on its figures may follow
    assert_says(first, "run visited is not up", "of 2000", "relax up")
