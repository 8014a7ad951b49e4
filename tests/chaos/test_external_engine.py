"""A real SGLang server that was started elsewhere joins a live run, leaves it, serves verified weights, and dies.

All processes of the run are killed in the states of these operations, and no row is lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.codec import open_envelope
from relax_actors.messages.operations import OperationRequest
from relax_actors.operations import OperationLog, State
from relax_actors.operations.engines import KEYS, save_key
from relax_actors.runtime.run_folder import RunFolder
from tests.support.faults import process, story_of, wait_for_cell
from tests.support.operation_kills import Met, actors_of, ended, holdings, latin, struck, wait_for_holdings
from tests.support.running import Run, wait_until
from tests.support.sglang_servers import Kept, skip_if_missing

skip_if_missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SERVED = (
    "rollout.backend=sglang",
    "run.steps=100000",
    "staleness.max=1",
    "supervision.intensity=50",
    "supervision.ack_wait=2",
    "supervision.start_deadline=400",
)
CLIENT = "rollout.9999000"
JOINING = (State.PENDING, State.CONNECTING, State.HEALTH_CHECKING, State.WEIGHT_SYNCING)
LEAVING = (State.PENDING, State.DRAINING, State.REMOVING)
VICTIMS = ("node", "broker", CLIENT, "trainer.0")
"""Processes of which two at once are killed in each state."""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Callable[[Run], Kept]]:
    """Start a server of a run's model that the run knows nothing of."""
    started: list[Kept] = []

    def start(run: Run) -> Kept:
        config, folder = run.folder.load_config(), tmp_path / "elsewhere"
        config = config.model_copy(update={"run": config.run.model_copy(update={"folder": folder})})
        shutil.copytree(run.folder.root / "model-config", config.model_path)
        folder.chmod(0o700)
        RunFolder(folder).save_config(config, run.folder.import_path)
        started.append(Kept(config))
        return started[0]

    yield start
    for kept in started:
        kept.close()


def rows_of(run: Run, author: str) -> int:
    """Trajectories in the table that an actor has written."""
    cells = run.table.snapshot([run.table.subjects.column("trajectory")])
    return sum(open_envelope(cell.data, None).author.startswith(f"{author}#") for _, cell in cells)


def join_and_leave(run: Run, add: Callable[[], int]) -> None:
    """Have a server join and leave the run, which loses all of its processes in all states."""
    log, before, met = OperationLog(run.table), {**holdings(run), "keys": []}, Met()
    for plan in latin(VICTIMS, (*JOINING, *LEAVING), 2):
        joined, there = struck(run, add, {state: plan[state] for state in JOINING})
        assert joined.state is State.ACTIVE, joined.reason
        request = OperationRequest("remove_engine", engine=joined.id)
        left, here = struck(run, lambda r=request: log.request(r).id, {state: plan[state] for state in LEAVING})
        assert left.state is State.REMOVED, left.reason
        met |= there | here
    assert {(victim, State.PENDING) for victim in VICTIMS if victim != CLIENT} <= met
    wait_for_holdings(run, before)


def test_an_external_engine_joins_leaves_and_dies_under_kills_and_loses_no_row(
    make_run: Callable[..., Run], elsewhere: Callable[[Run], Kept]
) -> None:
    run = make_run("joined", *SERVED).start()
    wait_until(run.folder.config.exists, "config.json", 60)
    wait_until(lambda: run.folder.saved_config() and run.folder.node.exists(), "the run's folder", 60)
    kept = elsewhere(run)
    wait_for_cell(run, "batch.0", 500)
    record, store, log = kept.record, run.folder.root / "store", OperationLog(run.table)
    refused = log.request(OperationRequest("add_engine", url=record.url, key_file=save_key(store, "not its key")))
    operation = ended(run, refused.id)
    assert (operation.state, "refuses the key" in operation.reason) == (State.FAILED, True), operation.reason

    def add() -> int:
        # A key that no engine uses is removed after a minute.
        key = save_key(store, record.key)
        return log.request(OperationRequest("add_engine", url=record.url, key_file=key)).id

    join_and_leave(run, add)
    joined = add()
    operation = ended(run, joined)
    assert operation.state is State.ACTIVE, operation.reason
    wait_until(lambda: rows_of(run, CLIENT) > 0, "a row of the external engine", 300)
    kept.close()
    gone = wait_until(lambda: [o for o in log.read().operations.values() if o.request.engine == joined], "removal")
    assert ended(run, gone[0].id).state is State.REMOVED
    assert actors_of(run) == ["rollout.0"]
    assert process(run, CLIENT) is None
    assert not run.folder.engines.exists()
    steps = max(cell.step for cell in run.table.list_cells(run.table.subjects.numbered("batch", "*")))
    wait_for_cell(run, f"batch.{steps + 3}", 300)
    run.end_in_order()
    story = story_of(run)
    assert (story.of("row_lost"), story.of("row_quarantined")) == ([], [])
    # The keys of the refused and of the lost engine are removed when they are a minute old.
    assert len(list((store / KEYS).iterdir())) <= 2
