"""Measure the commands that a user waits for: seconds of wall and CPU time of each, as the median of several runs.

Every command is a process of its own, started as from a shell; the rounds are interleaved, so that a slower minute of
the machine affects all commands alike. CPU time includes the broker that `status`, `tree` and `ledger` start to read a
run that is not up. The first round, which is not counted, writes the byte code of modules that have changed.

    python benchmarks/commands.py [RUN] [--rounds 7] [--json]

RUN is the folder of a run, finished or up. Without it, a run of the demo with a few steps is made first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEMO = Path(__file__).parents[1] / "examples" / "demo" / "demo.toml"
RELAX = (sys.executable, "-m", "relax_actors.cli.main")


def commands(run: Path) -> dict[str, list[str]]:
    """Commands to measure, with their arguments."""
    of_run = {verb: [verb, str(run)] for verb in ("status", "tree", "ledger")}
    return {"--version": ["--version"], "--help": ["--help"], "check": ["check", str(DEMO)], **of_run}


def measure(arguments: list[str]) -> tuple[float, float]:
    """Run a command; return its wall and CPU seconds."""
    started = time.perf_counter()
    process = subprocess.Popen([*RELAX, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"relax {' '.join(arguments)} ended with exit code {process.returncode}")
    return wall, used.ru_utime + used.ru_stime


def finished_run(folder: Path) -> Path:
    """Make a short run of the demo."""
    settings = [f"run.folder={folder}", "run.steps=4", "trainer.warmup_steps=0", "eval.rows=8"]
    subprocess.run([*RELAX, "up", str(DEMO), "--quiet", *settings], check=True, stdout=subprocess.DEVNULL)
    return folder


def main() -> None:
    """Print the medians, as a table or as JSON."""
    parser = argparse.ArgumentParser(description="Measure the commands that a user waits for.")
    parser.add_argument("run", nargs="?", type=Path, help="folder of a run; a short one is made if left out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as temporary:
        run = options.run or finished_run(Path(temporary) / "run")
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands(run)}
        for counted in [False, *[True] * options.rounds]:
            for name, arguments in commands(run).items():
                seconds = measure(arguments)
                if counted:
                    found[name].append(seconds)
    medians = {
        name: {
            "wall": round(statistics.median(w for w, _ in times), 3),
            "cpu": round(statistics.median(c for _, c in times), 3),
        }
        for name, times in found.items()
    }
    if options.json:
        print(json.dumps(medians))
        return
    print(f"{'command':12} {'wall s':>7} {'CPU s':>7}   median of {options.rounds}")
    for name, median in medians.items():
        print(f"{name:12} {median['wall']:7.2f} {median['cpu']:7.2f}")


if __name__ == "__main__":
    main()
