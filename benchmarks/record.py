"""Measure what looking at a run costs: seconds of a step with [record] and the console on and off, in pairs of demos.

    python benchmarks/record.py [--steps 60] [--pairs 3] [--console] [--set record.every=1 ...]

With `--console` a client follows the run as an open page does: it reads the stream of the log and asks for the answers
of the view of the run once a second. Without it, no console is asked.

Other programs on the machine slow single steps, so the medians of each run are compared within a pair, and the order
within the pairs alternates. The CPU time of recorder and console does not depend on other programs.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import httpx

from relax_actors.console.link import load_link
from relax_actors.isolation.proc import processes
from relax_actors.messages import Batch
from relax_actors.monitoring.access import Access
from relax_actors.monitoring.connection import connected
from relax_actors.runtime.run_folder import RunFolder

DEMO = Path(__file__).parents[1] / "examples" / "demo" / "demo.toml"
ANSWERS = ("run", "ledger", "events?last=100", "curves?names=step/reward,step/loss,step/grad_norm,step/staleness")
"""What the view of a run asks for."""
WARM_UP = 0.2
"""Share of the steps that are left out at the start."""


class Page(threading.Thread):
    """Follows a run as an open page does, until it is closed.

    Args:
        folder: folder of the run.

    Attributes:
        answers: answers that it got.
        messages: messages of the log that it got.
        cpu: CPU seconds of the process of the console, when they were last read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder, self._closed = folder, threading.Event()
        self.answers = self.messages = 0
        self.cpu = 0.0

    def run(self) -> None:
        """Ask for answers once a second, and follow the log in another thread."""
        while (link := load_link(self._folder)) is None:
            if self._closed.wait(0.1):
                return
        url, head = link.url().partition("/#")[0], {"Authorization": f"Bearer {link.observer}", "Relax-Pulse": "1"}
        with httpx.Client(base_url=url, headers=head, trust_env=False, timeout=15) as client:
            threading.Thread(target=self._follow, args=(client,), daemon=True).start()
            while not self._closed.wait(1.0):
                for name in ANSWERS:
                    with suppress(httpx.HTTPError):
                        self.answers += client.get(f"/api/{name}").status_code == httpx.codes.OK
                self.cpu = max(self.cpu, self._console_seconds())

    def _follow(self, client: httpx.Client) -> None:
        last: dict[str, str] = {}
        while not self._closed.wait(0.2):
            with suppress(httpx.HTTPError, RuntimeError), client.stream("GET", "/api/log", headers=last) as answer:
                for line in answer.iter_lines():
                    self.messages += line == "event: log"
                    if line.startswith("id: "):
                        last = {"Last-Event-ID": line[4:]}

    def _console_seconds(self) -> float:
        for pid in processes():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"--listen-fd" in command and str(self._folder).encode() in command:
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self.join()


def train(folder: Path, steps: int, settings: list[str], page: Page | None) -> list[float]:
    """Run the demo in a folder while a page may show it; return the seconds between the batches of its steps."""
    command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(DEMO), f"run.folder={folder}"]
    command += ["--no-console"] if page is None else []
    if page is not None:
        page.start()
    subprocess.run(
        [*command, f"run.steps={steps}", *settings],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder.parent,
    )
    if page is not None:
        page.close()
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
    parser.add_argument("--console", action="store_true", help="follow the run in the console where the record is on")
    parser.add_argument("--set", nargs="*", default=[], help="settings of all runs, e.g. record.every=1")
    given = parser.parse_args()
    ratios, cpu = [], []
    for pair in range(given.pairs):
        found = {}
        for which in ("off", "on") if pair % 2 else ("on", "off"):
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place) / "run"
                off = ["record.max_mib=0"] if which == "off" else []
                page = Page(folder) if given.console and which == "on" else None
                found[which] = statistics.median(train(folder, given.steps, [*given.set, *off], page))
                if page is not None:
                    print(
                        f"page: {page.answers} answers, {page.messages} messages of the log; console "
                        f"{1000 * page.cpu / given.steps:.1f} ms of CPU a step"
                    )
                if which == "on":
                    seconds, size = recorded(folder)
                    cpu.append(seconds / given.steps)
        ratios.append(found["on"] / found["off"])
        print(f"pair {pair}: on {found['on']:.4f} s, off {found['off']:.4f} s, ratio {ratios[-1]:.3f}; {size} bytes")
    print(
        f"median ratio {statistics.median(ratios):.3f}; recorder {1000 * statistics.median(cpu):.1f} ms of CPU a step; "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
