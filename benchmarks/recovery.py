"""Measure the recovery of every role, the node and the broker: time from SIGKILL to the first new output.

Runs the demo and kills, in random order, the trainer, the rollout, the reward, the advantages, the prompts, the
evaluator, the node's supervisor (all its actors die with it) and the broker. The first new output is

    a role    the first cell that its next incarnation has stored
    node      the first cell of the next incarnation of any role
    broker    the first cell stored after its death

"Load" is the time that the part needs to be ready: imports, engine and model of the actor that wrote the cell (event
`ready`), for the node also the imports of the zygote (from its log), nothing for the broker. "Next step" is the time to
the first step that begins after the death. A row is "rolled out again" if an incarnation of the rollout was generating
it when it was killed and a later one wrote its trajectory, or if two incarnations tried to write it. "Replayed" counts
the steps that the trainer repeated from its checkpoint. A trajectory is lost if it disappeared before its row was
trained or dropped; a trajectory stored twice counts as lost, too.

    python benchmarks/recovery.py [--kills 10] [--seed 1] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from live_run import LiveRun, wait_for

from broker.subjects import RowId
from relax_actors.runtime import logs
from relax_actors.runtime.blackbox import BlackBox

ROLES = ("trainer", "rollout", "reward", "advantages", "prompts", "evaluator")
TARGETS = (*ROLES, "node", "broker")
SETTLE_STEPS = 10
SETTINGS = [
    "run.steps=100000",
    "eval.every=4",
    "eval.rows=8",
    "trainer.checkpoint_every=20",
    "supervision.intensity=100000",
    "supervision.period=5",
]


@dataclass
class Recovered:
    """Results of the kills of one part; times in seconds."""

    seconds: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    rows_again: int = 0
    replayed: int = 0

    def row(self) -> dict[str, float]:
        """Summarise as figures."""
        beyond = [a - b for a, b in zip(self.seconds, self.load, strict=True)]
        return {
            "kills": len(self.seconds),
            "median_s": round(statistics.median(self.seconds), 2),
            "p95_s": round(float(np.percentile(self.seconds, 95)), 2),
            "load_s": round(statistics.median(self.load), 2),
            "median_beyond_load_s": round(statistics.median(beyond), 2),
            "p95_beyond_load_s": round(float(np.percentile(beyond, 95)), 2),
            "next_step_s": round(statistics.median(self.step), 2),
            "rows_again": self.rows_again,
            "steps_replayed": self.replayed,
        }


def rows_being_generated(run: LiveRun) -> set[tuple[int, int]]:
    """Training rows that the rollout was generating, from its black box."""
    box = BlackBox(run.folder.black_box("rollout.0"))
    rows = [RowId.parse(text) for text in box.read().rows]
    box.close()
    return {(row.step, row.index) for row in rows if row.kind == "group"}


def preload(run: LiveRun) -> float:
    """Seconds of the last import of the zygote."""
    return float(re.findall(r"preloaded .* in ([0-9.]+) s", run.folder.log("zygote").read_text())[-1])


def incarnations(run: LiveRun) -> dict[str, int]:
    """Current incarnation of every role."""
    found = run.connection.call(run.state.leases(), 30)
    return {role: int(found[f"{role}.0"]["incarnation"]) for role in ROLES if f"{role}.0" in found}


def kill_once(run: LiveRun, target: str, into: Recovered) -> None:
    """Kill a part, wait for its first new output, and record the figures."""
    seen = run.seen
    before = wait_for(lambda: found if len(found := incarnations(run)) == len(ROLES) else None, "lease of every role")
    events = len(seen.events)
    at = run.kill(target)
    dead = time.time()
    generating = rows_being_generated(run) if target in ("rollout", "node") else set()

    def first_output() -> tuple[float, str] | None:
        run.check()
        if target == "broker":
            return (seen.stored, "") if seen.stored > dead else None
        roles = ROLES if target == "node" else (target,)
        later = {
            role: w.stored
            for (role, incarnation), w in list(seen.first.items())
            if role in roles and incarnation > before[role]
        }
        return min(((stored, role) for role, stored in later.items() if stored > at), default=None)

    stored, by = wait_for(first_output, f"output of {target}")

    def load() -> float | None:
        found = [e for e in seen.events[events:] if e["kind"] == "ready" and e["role"] == by]
        if not found:
            return None
        before_fork = preload(run) if target == "node" else 0.0
        # A new node that waits for the zygote publishes late that another actor is ready.
        return min(stored - at, before_fork + float(str(found[0]["seconds"])))

    into.seconds.append(stored - at)
    into.load.append(wait_for(load, f"event that {by} is ready") if by else 0.0)
    # The trainer may outlive its node for a moment.
    least = before["trainer"] + (target in ("trainer", "node"))
    steps = wait_for(
        lambda: [stored for stored, incarnation in seen.batches if stored > dead and incarnation >= least], "step"
    )
    into.step.append(steps[0] - at)
    run.wait_for_steps(seen.steps + SETTLE_STEPS)
    into.replayed += sum(int(str(e["replayed"])) for e in seen.events[events:] if e["kind"] == "recovered")
    for row in generating:
        into.rows_again += any(incarnation > before["rollout"] for _, incarnation in seen.trajectories.get(row, []))
    print(f"killed {target}: {into.seconds[-1]:.2f} s, of which load {into.load[-1]:.2f} s", file=sys.stderr)


def measure(kills: int, seed: int, targets: list[str], folder: Path) -> dict[str, object]:
    """Kill every target `kills` times, in random order."""
    source = random.Random(seed)  # noqa: S311 not a secret
    found = {target: Recovered() for target in targets}
    run = LiveRun(folder, SETTINGS)
    try:
        run.wait_for_steps(2 * SETTLE_STEPS)
        for _ in range(kills):
            for target in source.sample(targets, len(targets)):
                time.sleep(source.uniform(0, 1))
                kill_once(run, target, found[target])
        twice = sum(len(authors) > 1 for authors in run.seen.attempts.values())
        lost = run.lost()
        account = run.account()
    finally:
        run.stop()
    return {
        "parts": {target: recovered.row() for target, recovered in found.items()},
        "rows_generated_twice": twice,
        "trajectories": len(run.seen.trajectories),
        "lost": lost,
        "account": account,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="PART")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logs.configure(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(options.kills, options.seed, options.targets, Path(scratch) / "recovery")
    names = ("median_s", "p95_s", "load_s", "median_beyond_load_s", "p95_beyond_load_s", "next_step_s")
    print(f"{'killed':11}", *(f"{name[:-2].replace('_', ' '):>18}" for name in names), " rows again  steps replayed")
    for target, row in result["parts"].items():  # type: ignore[attr-defined]
        figures = (f"{row[name]:18.2f}" for name in names)
        print(f"{target:11}", *figures, f"{row['rows_again']:11} {row['steps_replayed']:15}")
    print(f"trajectories {result['trajectories']}, generated to the end twice {result['rows_generated_twice']}")
    print(f"lost {len(result['lost'])}", *result["lost"][:5], sep="\n  ")  # type: ignore[arg-type,index]
    print("rows: " + ", ".join(f"{name} {n}" for name, n in result["account"].items()))  # type: ignore[attr-defined]
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
