"""Measure what the record of rows costs: seconds of a step with [record] on and off, in pairs of runs of the demo.

    python benchmarks/record.py [--steps 60] [--pairs 3] [--set record.every=1 ...]

Other programs on the machine slow single steps, so the medians of each run are compared within a pair, and the order
within the pairs alternates. The CPU time of the recorder does not depend on other programs.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from relax_actors.messages import Batch
from relax_actors.monitoring.access import Access
from relax_actors.monitoring.connection import connected
from relax_actors.runtime.run_folder import RunFolder

DEMO = Path(__file__).parents[1] / "examples" / "demo" / "demo.toml"
WARM_UP = 0.2
"""Share of the steps that are left out at the start."""


def train(folder: Path, steps: int, settings: list[str]) -> list[float]:
    """Run the demo in a folder; return the seconds between the batches of its steps."""
    command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(DEMO), f"run.folder={folder}", "--quiet"]
    subprocess.run(
        [*command, f"run.steps={steps}", *settings], check=True, stdout=subprocess.DEVNULL, cwd=folder.parent
    )
    with connected(str(folder), Access()) as at:
        cells = (at.table.fetch(at.table.subjects.numbered("batch", step), Batch) for step in range(steps))
        times = [cell.unix_time for cell in cells if cell is not None]
    found = [later - earlier for earlier, later in pairwise(times)]
    return found[int(WARM_UP * len(found)) :]


def recorded(folder: Path) -> tuple[float, int]:
    """CPU seconds of the recorder of a run, and bytes of its record."""
    line = re.findall(
        r"event='recorded' bytes=(\d+) cpu_seconds=([\d.]+)", RunFolder(folder).log("recorder").read_text()
    )
    return float(line[-1][1]), int(line[-1][0])


def main() -> None:
    """Print the seconds of a step of each pair, and what the recorder took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], help="settings of all runs, e.g. record.every=1")
    given = parser.parse_args()
    ratios, cpu = [], []
    for pair in range(given.pairs):
        found = {}
        for which in ("off", "on") if pair % 2 else ("on", "off"):
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place) / "run"
                off = ["record.max_mib=0"] if which == "off" else []
                found[which] = statistics.median(train(folder, given.steps, [*given.set, *off]))
                if which == "on":
                    seconds, size = recorded(folder)
                    cpu.append(seconds / given.steps)
        ratios.append(found["on"] / found["off"])
        print(f"pair {pair}: on {found['on']:.4f} s, off {found['off']:.4f} s, ratio {ratios[-1]:.3f}; {size} bytes")
    print(
        f"median ratio {statistics.median(ratios):.3f}; recorder {1000 * statistics.median(cpu):.1f} ms of CPU a step"
    )


if __name__ == "__main__":
    main()
