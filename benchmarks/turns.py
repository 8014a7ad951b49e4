"""Compare roles that take turns in the memory of this machine with the same roles beside each other.

    python benchmarks/turns.py [--layers 8] [--hidden 512] [--steps 8] [--ranks 1] [--json]

Each placement trains the demo's task with a larger model, on-policy and with a reference in an actor of its own, and
ends with the same weights. Memory is the largest PSS of all processes of the run; `left` is what all ranks of the
trainer move to the disk in a turn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from process_memory import PeakMemory
from rich.console import Console
from rich.table import Table

from broker.ordered_consumer import OrderedConsumer
from relax_actors.monitoring.connection import connected

DEMO = Path(__file__).parents[1] / "examples" / "demo" / "demo.toml"
TURNS = "placement.colocate=[['rollout', 'reference', 'trainer']]"
PLACEMENTS = {
    "beside each other": (),
    "in turns, memory stays": (TURNS, "placement.release=none"),
    "in turns, memory leaves": (TURNS, "placement.release=disk"),
}
WAYS = ("released", "resumed")
COMMON = (
    *("run.deterministic=true", "staleness.max=0", "trainer.warm_start.steps=1", "trainer.checkpoint_every=1000"),
    *("roles.reference.replicas=1", "algorithm.kl.place=loss", "algorithm.kl.coefficient=0.1", "eval.every=1000"),
)


def measure(name: str, folder: Path, more: tuple[str, ...]) -> dict[str, Any]:
    """Run one placement; return its figures."""
    command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(DEMO), "--json", "--quiet", f"run.name={name}"]
    process = subprocess.Popen([*command, f"run.folder={folder / name}", *COMMON, *more], stdout=subprocess.PIPE)
    memory, began = PeakMemory(process.pid, 0.1), time.monotonic()
    memory.start()
    said, _ = process.communicate()
    seconds = time.monotonic() - began
    memory.stop()
    if process.returncode:
        sys.exit(f"{name} ended with exit code {process.returncode}; its logs are in {folder / name / 'logs'}")
    turns = [figures for figures in metrics(folder / name) if figures.get("kind") == "turn"]
    own = [figures for figures in turns if figures["role"] == "trainer"]
    roles = {figures["role"] for figures in turns}
    moving = {f"{way}_seconds": sum(_last(turns, role, way) for role in roles) for way in WAYS}
    return {
        "peak_mib": round(memory.peak),
        "seconds": round(seconds, 1),
        "left_mib": max((figures["device_released_mib"] for figures in own), default=0),
        "turns": len(turns),
        **{key: round(value, 2) for key, value in moving.items()},
        "weights": json.loads(said.splitlines()[-1])["weights_fingerprint"],
    }


def _last(turns: list[dict[str, Any]], role: str, way: str) -> float:
    return max(float(figures[f"device_{way}_seconds"]) for figures in turns if figures["role"] == role)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run that has ended."""
    with connected(str(run)) as at:
        connection, subjects = at.table.connection, at.table.subjects
        follower = OrderedConsumer(connection, subjects.log_stream, [f"{subjects.prefix}.metric.>"])
        return [json.loads(message.data) for message in connection.call(follower.read_all(caught_up=False), 60)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    shape = {"hidden_size": chosen.hidden, "intermediate_size": 3 * chosen.hidden, "num_hidden_layers": chosen.layers}
    size = [f"model.architecture.{name}={value}" for name, value in shape.items()]
    size += [f"run.steps={chosen.steps}", f"trainer.torch.ranks={chosen.ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: measure(f"run{number}", Path(folder), (*size, *more))
            for number, (name, more) in enumerate(PLACEMENTS.items())
        }
    if len({figures["weights"] for figures in found.values()}) > 1:
        sys.exit(f"the placements ended with different weights: {found}")
    table = Table("", *(name for name in next(iter(found.values())) if name != "weights"))
    for name, figures in found.items():
        table.add_row(name, *(str(value) for key, value in figures.items() if key != "weights"))
    Console(stderr=chosen.json, width=110).print(table)
    if chosen.json:
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
