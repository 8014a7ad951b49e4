"""Measure rollouts that come and go while the demo runs: 1 to `--most` actors and back, as operations.

"First row" is the time from the request to the first row that a new rollout has stored, by the states of the operation.
Rows are lost if a trajectory disappeared before its row ended, or the ledger does not add up. Tokens are generated
twice if two actors tried to write the trajectory of one row: those of the row, once. The throughput is in rows per
second, before, while the actors start, with all of them, while they leave, and after.

    python benchmarks/elastic.py [--most 4] [--seconds 20] [--force] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

from live_run import DEADLINE, LiveRun, wait_for

from relax_actors.messages import Trajectory
from relax_actors.messages.operations import OperationRequest
from relax_actors.operations import Operation, OperationLog, State
from relax_actors.runtime import logs

SETTINGS = ["run.steps=100000", "staleness.max=4", "trainer.checkpoint_every=50"]
STATES = (State.CREATING, State.CONNECTING, State.HEALTH_CHECKING, State.WEIGHT_SYNCING, State.READY, State.ACTIVE)


def scale(run: LiveRun, target: int, *, force: bool) -> Operation:
    """Scale the rollouts and wait for the end of the operation."""
    log = OperationLog(run.table)
    number = log.request(OperationRequest("scale", target=target, force=force, author="benchmark")).id

    def end() -> Operation | None:
        run.check()
        operation = log.read().operations[number]
        return operation if operation.is_over else None

    operation = wait_for(end, f"{target} rollouts", 4 * DEADLINE)
    if operation.state not in (State.ACTIVE, State.REMOVED):
        sys.exit(f"operation {number} is {operation.state}: {operation.reason}")
    return operation


def first_rows(run: LiveRun, operation: Operation) -> dict[str, float]:
    """Wait for the first row of each new actor; return the seconds from the request to it."""
    actors = [] if operation.plan is None else operation.plan.actors

    def found() -> dict[str, float]:
        run.check()
        first: dict[str, float] = {}
        for stored, actor in list(run.seen.written):
            first.setdefault(actor, stored)
        return first if set(actors) <= set(first) else {}

    first = wait_for(found, "a row of each new rollout")
    asked = operation.times[State.PENDING]
    return {actor: round(first[actor] - asked, 2) for actor in actors}


def rows_per_second(run: LiveRun, began: float, ended: float) -> float:
    """Rows that were generated between two times."""
    count = sum(began <= stored < ended for stored, _ in list(run.seen.written))
    return round(count / max(ended - began, 1e-6), 2)


def tokens_twice(run: LiveRun) -> int:
    """Tokens of the rows whose trajectory more than one incarnation tried to write."""
    again = [row for row, authors in list(run.seen.authors.items()) if len(authors) > 1]
    tokens = 0
    for step, index in again:
        cell = run.table.fetch(f"{run.subjects.prefix}.group.{step}.{index}.trajectory", Trajectory)
        tokens += 0 if cell is None else len(cell.token_ids)
    return tokens


def measure(run: LiveRun, most: int, seconds: float, *, force: bool) -> dict[str, object]:
    """Scale out and in, and return the figures."""
    run.wait_for_steps(3, 2 * DEADLINE)
    marks = [time.time()]
    time.sleep(seconds)
    marks.append(time.time())
    out = scale(run, most, force=force)
    first = first_rows(run, out)
    marks.append(time.time())
    time.sleep(seconds)
    marks.append(time.time())
    back = scale(run, 1, force=force)
    marks.append(time.time())
    time.sleep(seconds)
    marks.append(time.time())
    names = ("before", "scaling_out", "with_all", "scaling_in", "after")
    spans = zip(names, marks, marks[1:], strict=False)
    asked = out.times[State.PENDING]
    return {
        "rollouts": most,
        "seconds_to_first_row": max(first.values()),
        "first_row_by_actor": first,
        "states": {state.value: round(out.times[state] - asked, 2) for state in STATES if state in out.times},
        "seconds_to_leave": round(back.times[State.REMOVED] - back.times[State.PENDING], 2),
        "rows_lost": len(run.lost()),
        "tokens_twice": tokens_twice(run),
        "rows_per_second": {name: rows_per_second(run, began, ended) for name, began, ended in spans},
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=4, help="rollouts at most")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds before, between and after")
    parser.add_argument("--force", action="store_true", help="rollouts that leave return their rows at once")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    arguments = parser.parse_args()
    logs.configure(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        run = LiveRun(Path(folder) / "elastic", SETTINGS)
        try:
            found = measure(run, arguments.most, arguments.seconds, force=arguments.force)
        finally:
            run.stop()
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"1 to {found['rollouts']} rollouts: first row after {found['seconds_to_first_row']} s")
    print(f"seconds to each state: {found['states']}")
    print(f"back to 1 after {found['seconds_to_leave']} s")
    print(f"rows lost {found['rows_lost']}, tokens generated twice {found['tokens_twice']}")
    print(f"rows per second: {found['rows_per_second']}")


if __name__ == "__main__":
    main()
