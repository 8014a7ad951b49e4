"""Measure the cost of `isolation = "sandbox"`: the same reward actor with and without it.

A reward function measures inside its actor: CPU seconds until its first row, round trips to the broker, and the rate of
large messages to it. The memory of the process that connects a sandbox to the broker is read outside.

    python benchmarks/sandbox.py [--trips 500] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from broker.address import Address
from broker.connection import Connection
from relax_actors.messages import Prompt

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "support"
MARK, TRIPS = "MEASURED ", "SANDBOX_TRIPS"
LARGE, MESSAGES = bytes(200 << 10), 100
_done: list[bool] = []


def measure(completion: str, _prompt: Prompt) -> float:
    """Measure once in each actor, and print the result to its log; a reward function."""
    if not _done:
        _done.append(True)
        cpu = time.process_time()
        folder = next(Path(word) for word in sys.argv[1:] if Path(word, "broker.json").is_file())
        with closing(Connection(Address.load(folder / "broker.json").for_user("reward"), "benchmark")) as connection:
            result = connection.call(_measured(connection), 120)
        os.write(2, f"{MARK}{json.dumps({'cpu_seconds': cpu, **result})}\n".encode())
    return completion.count("7") / max(1, len(completion))


async def _measured(connection: Connection) -> dict[str, float]:
    times = []
    for _ in range(int(os.environ[TRIPS])):
        began = time.perf_counter()
        await connection.nc.flush(10)
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(MESSAGES):
        await connection.nc.publish("relax.cost.event.reward.0.large", LARGE)
        await connection.nc.flush(10)
    rate = MESSAGES * len(LARGE) / (time.perf_counter() - began)
    return {"trip_ms": 1e3 * statistics.median(times), "megabytes_per_second": rate / 1e6}


def run_once(isolation: str, trips: int) -> dict[str, float]:
    """Train one step and return what the reward actor measured."""
    with tempfile.TemporaryDirectory(prefix="relax-sandbox-") as text:
        folder = Path(text)
        for path in (TINY / "tiny.toml", TINY / "tiny_tasks.py", Path(__file__)):
            shutil.copy(path, folder)
        (folder / "sandbox.py").rename(folder / "sandbox_cost.py")
        settings = ["run.name=cost", "run.steps=1", "reward.function=sandbox_cost.measure"]
        command = [sys.executable, "-m", "relax_actors.cli.main", "up", "tiny.toml", *settings, "--quiet"]
        environment = os.environ | {TRIPS: str(trips)}
        command.append(f"reward.isolation={isolation}")
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        keeper = 0.0
        while process.poll() is None:
            keeper = max(keeper, _keeper_mib(folder))
            time.sleep(0.05)
        log = (folder / "runs" / "cost" / "logs" / "reward.0.log").read_text()
        if process.returncode or MARK not in log:
            sys.exit(f"the run ended with {process.returncode}; the end of its log:\n{log[-2000:]}")
        found: dict[str, Any] = json.loads(log.partition(MARK)[2].splitlines()[0])
    return {**found, "keeper_mib": keeper}


def _keeper_mib(folder: Path) -> float:
    """Memory of the process beside a sandbox, without pages that it shares."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().decode(errors="replace")
            if "sandbox_keeper" in command and str(folder) in command:
                lines = (path / "smaps_rollup").read_text().splitlines()
                return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
        except OSError:
            continue
    return 0.0


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trips", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"none": [], "sandbox": []}
    for _ in range(arguments.rounds):
        for isolation, results in found.items():
            results.append(run_once(isolation, arguments.trips))
    names = list(found["none"][0])
    sys.stdout.write(f"{'isolation':10}" + "".join(f"{name:>22}" for name in names) + "\n")
    for isolation, results in found.items():
        medians = (statistics.median(result[name] for result in results) for name in names)
        sys.stdout.write(f"{isolation:10}" + "".join(f"{value:22.3f}" for value in medians) + "\n")


if __name__ == "__main__":
    main()
