"""Kill ranks of a Megatron-Core trainer on two nodes, and whatever holds them; measure the time to the next step.

    python benchmarks/rank_recovery.py [--kills 20] [--ranks 4] [--seed 1] [--json]

The demo trains on ranks of which the second half is on a node of its own (a `relax node`). What is killed, in random
order, as often as `--kills` says in all:

    rank           a rank beside the trainer
    remote rank    a rank on the other node
    trainer        the actor of the trainer
    supervisor     the supervisor of the other node, with its actor and ranks
    node           all processes of the other node at once; a new node joins

Each death restarts all ranks from the last checkpoint; they then repeat the steps after it. "Next step" is the time
from SIGKILL to the first new step that the restarted trainer begins, "ready" that until the ranks have joined again, in
brackets of how many deaths. The weights at the end must be those of a run of the same steps on one node that nothing
disturbs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from live_run import LiveRun, is_alive, wait_for
from process_memory import PROC, tree

from broker.address import Address
from broker.permissions import OPERATOR

RANK, SUPERVISOR = "relax_actors.engines.ranks.rank", "relax_actors.supervision.node"
TARGETS = ("rank", "remote rank", "trainer", "supervisor", "node")
LAYOUTS = {2: {"tensor_parallel": 2}, 4: {"tensor_parallel": 2, "pipeline_parallel": 2}}
SETTINGS = [
    "model.architecture.num_hidden_layers=4",
    "staleness.max=0",
    "run.deterministic=true",
    "eval.every=0",
    "eval.rows=1",
    "trainer.backend=megatron",
    "trainer.device=cpu",  # more ranks than cores share them
    "trainer.prompts_per_step=4",
    "trainer.checkpoint_every=3",
    "trainer.warm_start.steps=1",
    "supervision.intensity=100000",
    "supervision.start_deadline=600",
]
STEPS = 2
"""Steps from one death to the next."""
DEADLINE = 900.0


class RemoteNode:
    """A `relax node` that hosts ranks of a run."""

    def __init__(self, run: LiveRun, name: str, ranks: int) -> None:
        address = Address.load(run.folder.address).for_user(OPERATOR)
        keys = Path(str(address.credentials)).parent.parent  # the folders of all users, of which each role has one
        command = [sys.executable, "-m", "relax_actors.cli.main", "node", "--broker", address.url]
        command += ["--credentials", str(keys), "--store", str(run.folder.root / "store")]
        command += ["--role", f"trainer_rank={ranks}"]
        command += ["--name", name, "--work", str(run.folder.root.parent / name)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        """Process of the command."""
        return self._process.pid

    def vanish(self) -> None:
        """Kill all processes of the node at once."""
        for pid in tree(self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def process(root: int, module: str) -> int:
    """Return a process below `root` that runs a module, as soon as there is one."""

    def look() -> int:
        for pid in tree(root):
            with suppress(OSError):
                if module in (PROC / str(pid) / "cmdline").read_bytes().decode().split("\0"):
                    return pid
        return 0

    return wait_for(look, f"process of {module}", DEADLINE)


class Killing:
    """Kills parts of a run one after the other.

    Args:
        run: the run.
        ranks: number of its ranks.
    """

    def __init__(self, run: LiveRun, ranks: int) -> None:
        self._run, self._nodes, self._ranks = run, 0, ranks
        self._node = self._join()
        self.next_step: dict[str, list[float]] = defaultdict(list)
        self.ready: dict[str, list[float]] = defaultdict(list)

    def _join(self) -> RemoteNode:
        self._nodes += 1
        return RemoteNode(self._run, f"other{self._nodes}", self._ranks // 2)

    def kill(self, target: str) -> None:
        """Kill a part as soon as it has a process, and wait for the next step."""
        run = self._run
        before, events = run.seen.batches[-1][1], len(run.seen.events)
        root = run.process.pid if target in ("rank", "trainer") else self._node.pid
        if target in ("rank", "remote rank", "supervisor"):
            pid = process(root, SUPERVISOR if target == "supervisor" else RANK)
            at = time.time()
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not is_alive(pid), f"end of {target}", DEADLINE)
        elif target == "trainer":
            at = run.kill("trainer")
        else:
            at = time.time()
            self._node.vanish()
            self._node = self._join()

        def began() -> float:
            run.check()
            return min(
                (stored for stored, number in list(run.seen.batches) if number > before and stored > at), default=0
            )

        self.next_step[target].append(wait_for(began, f"step after the death of {target}", DEADLINE) - at)
        joined = [event for event in run.seen.events[events:] if (event["kind"], event["role"]) == ("ready", "trainer")]
        self.ready[target] += [float(str(event["time"])) - at for event in joined[-1:]]
        print(f"killed {target}: next step after {self.next_step[target][-1]:.1f} s", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the node."""
        self._node.vanish()


def settings_of(ranks: int, steps: int) -> list[str]:
    """Return the settings of a run on ranks."""
    layout = {"ranks": ranks, **LAYOUTS[ranks]}
    return [*SETTINGS, f"run.steps={steps}", *(f"trainer.megatron.{name}={value}" for name, value in layout.items())]


def measure(kills: int, ranks: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run once with deaths and once without; return the figures."""
    chance, steps = random.Random(seed), STEPS * (kills + 1)  # noqa: S311 order of a benchmark
    rounds = -(-kills // len(TARGETS))
    order = [target for _ in range(rounds) for target in chance.sample(TARGETS, len(TARGETS))][:kills]
    run = LiveRun(folder / "killed", [*settings_of(ranks, steps), f"trainer.megatron.local_ranks={ranks // 2}"])
    killing = Killing(run, ranks)
    try:
        for number, target in enumerate(order):
            run.wait_for_steps(STEPS * number + 1, DEADLINE)
            killing.kill(target)
        killed = run.complete(DEADLINE)
    finally:
        run.stop()
        killing.close()
    calm_run = LiveRun(folder / "calm", settings_of(ranks, steps))
    try:
        calm = calm_run.complete(DEADLINE)
    finally:
        calm_run.stop()
    return {
        "ranks": ranks,
        "kills": {target: len(found) for target, found in killing.next_step.items()},
        "next_step_s": {target: round(statistics.median(found), 2) for target, found in killing.next_step.items()},
        "slowest_s": {target: round(max(found), 2) for target, found in killing.next_step.items()},
        "ready_s": {target: round(statistics.median(found), 2) for target, found in killing.ready.items() if found},
        "ready": {target: len(found) for target, found in killing.ready.items()},
        "same_weights": killed["weights_fingerprint"] == calm["weights_fingerprint"],
        "lost": killed["dropped"] + killed["quarantined"] + killed["in_flight"],
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Print the table; exit with 1 if weights differ or rows are lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, choices=LAYOUTS, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(chosen.kills, chosen.ranks, chosen.seed, Path(folder))
    for target, seconds in found["next_step_s"].items():
        ready = f"{found['ready_s'][target]:6.1f}" if target in found["ready_s"] else "not seen"
        print(
            f"{target:12} killed {found['kills'][target]} times: next step after {seconds:6.1f} s, "
            f"at most {found['slowest_s'][target]:6.1f}; ready after {ready} ({found['ready'][target]})"
        )
    same = "the same" if found["same_weights"] else "OTHER"
    print(
        f"{chosen.kills} kills of {chosen.ranks} ranks: {same} weights, rows lost {found['lost']}, load {found['load']}"
    )
    if chosen.json:
        print(json.dumps(found))
    sys.exit(0 if found["same_weights"] and not found["lost"] else 1)


if __name__ == "__main__":
    main()
