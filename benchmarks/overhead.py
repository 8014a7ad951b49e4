"""Measure the overhead of the engine: CPU time per row over all processes, minus the time in the model.

Runs the demo and takes two readings after the start-up. "Model" is the time of the rollout's thread in the inference
engine and of the trainer's thread in the training engine. Everything else is overhead: broker, supervisors, encoding,
rewards, publishing weights, and the record of rows.

    python benchmarks/overhead.py [--steps 300] [--json] [--set record.max_mib=0 ...]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from live_run import PROGRAMS

from broker.address import Address
from broker.connection import Connection
from broker.errors import BrokerError
from broker.permissions import OBSERVER

DEMO = Path(__file__).parents[1] / "examples" / "demo" / "demo.toml"
TICKS = os.sysconf("SC_CLK_TCK")
DEADLINE = 600.0


@dataclass(frozen=True)
class Reading:
    """CPU seconds by process, model seconds, and trained rows at one moment."""

    cpu: dict[str, float]
    model: float
    rows: int


def name_of(pid: int, folder: Path) -> str | None:
    """Name the process of a run; None for processes of other programs."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ").split()
    except OSError:
        return None
    if not any(str(folder) in part for part in command):
        return None
    # The zygote's command line also contains the actor module, which the zygote imports.
    if "relax_actors.supervision.actor_process" in command and "relax_actors.supervision.zygote" not in command:
        return command[-2]
    return next((name for part, name in PROGRAMS.items() if any(part in word for word in command)), None)


def cpu_of(folder: Path) -> dict[str, float]:
    """CPU seconds of a run's processes, by name."""
    found: dict[str, float] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (name := name_of(int(path.name), folder)) is not None:
            fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
            found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / TICKS
    return found


class Listener:
    """Keeps the last metrics of every role."""

    def __init__(self, address: Address) -> None:
        self.last: dict[str, dict[str, float]] = {}
        self._connection = Connection(address, "bench")
        self._connection.call(self._listen(), 10)

    async def _listen(self) -> None:
        async def take(message: object) -> None:
            body = json.loads(message.data)  # type: ignore[attr-defined]
            if "kind" not in body:  # metrics with a kind belong to a step or a row
                self.last[body["role"]] = body

        await self._connection.nc.subscribe("relax.overhead.metric.>", cb=take)

    def read(self, folder: Path) -> Reading:
        """Take a reading."""
        model = sum(self.last.get(role, {}).get("model_cpu_seconds", 0.0) for role in ("rollout", "trainer"))
        return Reading(cpu_of(folder), model, int(self.last.get("prompts", {}).get("trained", 0)))

    def wait(self, rows: int) -> None:
        """Wait until `rows` rows are trained."""
        end = time.monotonic() + DEADLINE
        while self.last.get("prompts", {}).get("trained", 0) < rows:
            if time.monotonic() > end:
                sys.exit(f"{rows} rows were not trained within {DEADLINE:g} s")
            time.sleep(0.05)

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()


def measure(steps: int, folder: Path, settings: list[str]) -> dict[str, object]:
    """Run the demo with some settings and compare two readings, `steps` steps apart."""
    command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(DEMO), "run.name=overhead", "--quiet"]
    process = subprocess.Popen(
        [*command, f"run.folder={folder}", "run.steps=100000", *settings], stdout=subprocess.DEVNULL
    )
    try:
        address = wait_for_address(folder)
        listener = Listener(address)
        rows = 16
        listener.wait(20 * rows)
        first = listener.read(folder)
        listener.wait((20 + steps) * rows)
        last = listener.read(folder)
        listener.close()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    trained = last.rows - first.rows
    spent = {name: (last.cpu[name] - first.cpu.get(name, 0.0)) * 1e3 / trained for name in sorted(last.cpu)}
    model = (last.model - first.model) * 1e3 / trained
    total = sum(spent.values())
    return {"rows": trained, "model_ms": model, "overhead_ms": total - model, "total_ms": total, "by_process": spent}


def wait_for_address(folder: Path) -> Address:
    """Wait for the run's broker to answer; return its address."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            address = Address.load(folder / "broker.json").for_user(OBSERVER)
            Connection(address, "probe", 1.0).close()
        except BrokerError:
            time.sleep(0.1)
        else:
            return address
    sys.exit("the run's broker did not answer within 30 s")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the run, e.g. record.max_mib=0")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(options.steps, Path(scratch) / "run", options.set)
    print(f"{'process':12} CPU ms per row")
    for name, value in result["by_process"].items():  # type: ignore[attr-defined]
        print(f"{name:12} {value:8.2f}")
    print(f"{'total':12} {result['total_ms']:8.2f}")
    print(f"{'model':12} {result['model_ms']:8.2f}")
    print(f"{'overhead':12} {result['overhead_ms']:8.2f}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
