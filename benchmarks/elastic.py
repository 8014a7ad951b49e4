"""Measure rollouts that come and go while the demo runs; each of `--parts` has a run of its own.

- scale: 1 to `--most` rollouts and back, as operations.
- spot: for `--spot-seconds`, two spot nodes vanish at random moments with all of their processes, and come back.
- external: an SGLang server that the run did not start joins, generates, and is killed.

"First row" is the time from the request, or from the start of a spot node, to the first row that a new rollout has
stored: of the slowest one, and the median over spot nodes. Rows are lost if a trajectory disappeared before its row
ended, or the ledger does not add up. Tokens are generated twice if two actors tried to write the trajectory of one row:
those of the row, once. `--picture` draws rows per second over time.

    python benchmarks/elastic.py [--parts scale spot external] [--most 4] [--seconds 20] [--force]
                                 [--spot-seconds 600] [--picture docs/elastic.svg] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from elastic_parts import Part, ended, joining, measured, vanishing
from elastic_picture import draw
from live_run import DEADLINE, LiveRun

from relax_actors.messages.operations import OperationRequest
from relax_actors.operations import Operation, OperationLog, State
from relax_actors.runtime import logs

PARTS = ("scale", "spot", "external")
SETTINGS = ["run.steps=100000", "staleness.max=4", "trainer.checkpoint_every=50"]
# Rows of a rollout whose machine vanished go to others after this time.
SPOT = ["supervision.ack_wait=5", "rollout.spot_backlog=8"]
EXTERNAL = ["rollout.backend=sglang", "supervision.ack_wait=2", "supervision.start_deadline=600"]


def scale(run: LiveRun, target: int, *, force: bool) -> Operation:
    """Scale the rollouts and wait for the end of the operation."""
    request = OperationRequest("scale", target=target, force=force, author="benchmark")
    return ended(run, OperationLog(run.table).request(request).id)


def out_and_back(run: LiveRun, most: int, seconds: float, *, force: bool) -> Part:
    """Scale out and in."""
    part = Part(run)
    part.stay("before", seconds)
    part.mark("scaling out")
    measured(part, scale(run, most, force=force))
    part.stay(f"{most} rollouts", seconds)
    part.mark("scaling in")
    back = scale(run, 1, force=force)
    part.stay("after", seconds)
    leaving = back.times[State.REMOVED] - back.times[State.PENDING]
    part.facts = {"rollouts": most, "seconds_to_leave": round(leaving, 2)}
    return part


def measure(name: str, settings: list[str], steps_within: float, part_of: Callable[[LiveRun], Part]) -> Part:
    """Measure one part in a run of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run = LiveRun(Path(folder) / name, [*SETTINGS, *settings])
        try:
            run.wait_for_steps(3, steps_within)
            part = part_of(run)
            part.facts |= part.close()
        finally:
            run.stop()
    return part


def parts_of(arguments: argparse.Namespace) -> dict[str, Part]:
    """Measure all parts that were asked for."""
    quiet, most, spot = arguments.seconds, arguments.most, arguments.spot_seconds
    known: dict[str, Callable[[], Part]] = {
        "scale": lambda: measure(
            "scale", [], 2 * DEADLINE, lambda run: out_and_back(run, most, quiet, force=arguments.force)
        ),
        "spot": lambda: measure("spot", SPOT, 2 * DEADLINE, lambda run: vanishing(run, 2, spot, quiet, arguments.seed)),
        "external": lambda: measure("external", EXTERNAL, 8 * DEADLINE, lambda run: joining(run, quiet)),
    }
    return {name: known[name]() for name in arguments.parts}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["scale"], help="what to measure")
    parser.add_argument("--most", type=int, default=4, help="rollouts at most")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds before, between and after")
    parser.add_argument("--force", action="store_true", help="rollouts that leave return their rows at once")
    parser.add_argument("--spot-seconds", type=float, default=60.0, help="seconds in which spot nodes vanish")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments at which they do")
    parser.add_argument("--picture", type=Path, help="SVG to draw")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    arguments = parser.parse_args()
    logs.configure(logging.ERROR)
    load = os.getloadavg()[0]
    parts = parts_of(arguments)
    if arguments.picture:
        arguments.picture.write_text(draw(parts))
    total = {name: sum(part.facts[name] for part in parts.values()) for name in ("rows_lost", "tokens_twice")}
    if arguments.json:
        firsts = {name: part.facts.pop("seconds_to_first_row") for name, part in parts.items()}
        facts = {name: part.facts for name, part in parts.items()}
        print(json.dumps({**total, "seconds_to_first_row": firsts, "load_before": round(load, 1), "parts": facts}))
        return
    for name, part in parts.items():
        print(f"{name}: first row after {part.first_row.get('first_row')} s; {part.facts}")
    print(f"rows lost {total['rows_lost']}, tokens generated twice {total['tokens_twice']}")


if __name__ == "__main__":
    main()
