"""Measure the start of a run: seconds from the command `relax up` to its first optimizer step, by phase.

Each round is a new run. The first one is not counted, as Python may have to compile modules.

    python benchmarks/start.py [CONFIG] [--rounds 5] [--json] [SETTING ...]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

DEMO = Path(__file__).parents[1] / "examples" / "demo" / "demo.toml"
SHORT = ("run.steps=2", "trainer.warmup_steps=0", "trainer.checkpoint_every=2", "eval.every=2", "eval.rows=8")
LINE = re.compile(r"timestamp='(?P<time>[^']+)' level='\w+' event='(?P<event>\w+)' (?P<fields>.*)")
PHASES = {
    "imports and checks": "until the broker starts",
    "node": "until the node has joined the run",
    "zygote": "until it has imported torch and the models",
    "actors": "until all are ready",
    "first step": "until its end, a warm start included",
}


def events(log: Path) -> Iterator[tuple[float, str, str]]:
    """Yield Unix time, name and fields of the events in a log."""
    for line in log.read_text().splitlines():
        if (match := LINE.match(line)) is not None:
            at = datetime.fromisoformat(match["time"]).timestamp()
            yield at, match["event"], match["fields"]


def first(log: Path, event: str, field: str) -> float:
    """Return when an event of a process first occurred."""
    return min(at for at, name, fields in events(log) if name == event and field in fields)


def measure(config: Path, settings: list[str], folder: Path) -> dict[str, float]:
    """Start a run; return the seconds of each phase."""
    command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(config), f"run.folder={folder}", *SHORT]
    began = datetime.now().astimezone().timestamp()
    done = subprocess.run([*command, *settings, "--quiet", "--json"], check=True, stdout=subprocess.PIPE, text=True)
    step = json.loads(done.stdout.splitlines()[-1])["seconds_to_first_step"]
    root, node = folder / "logs" / "root.log", folder / "logs" / "node.log"
    ends = (
        first(root, "started", "child='broker'") - began,
        first(root, "ready", "child='node'") - began,
        first(node, "started", "role='trainer'") - began,
        max(at for at, name, _ in events(node) if name == "ready") - began,
        step,
    )
    return dict(zip(PHASES, (end - start for start, end in zip((0.0, *ends), ends, strict=False)), strict=True))


def main() -> None:
    """Print the medians, as a table or as JSON."""
    parser = argparse.ArgumentParser(description="Measure the start of a run by phase.")
    parser.add_argument("config", nargs="?", type=Path, default=DEMO)
    parser.add_argument("settings", nargs="*", metavar="SETTING")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    rounds = []
    for number in range(options.rounds + 1):
        with tempfile.TemporaryDirectory() as temporary:
            found = measure(options.config, options.settings, Path(temporary) / "run")
        if number:
            rounds.append(found)
    medians = {name: round(statistics.median(found[name] for found in rounds), 2) for name in PHASES}
    total = round(statistics.median(sum(found.values()) for found in rounds), 2)
    if options.json:
        print(json.dumps({"phases": medians, "total": total, "rounds": [sum(found.values()) for found in rounds]}))
        return
    for name, seconds in medians.items():
        print(f"{name:20} {seconds:6.2f} s   {PHASES[name]}")
    print(f"{'first step after':20} {total:6.2f} s   median of {options.rounds}")


if __name__ == "__main__":
    main()
