"""Check every path that computes on a GPU, and measure what it gives; no network, at most 25 minutes on one GPU.

    python benchmarks/gpu_check.py                    # all checks
    python benchmarks/gpu_check.py --short            # small sizes, without timings that need a GPU
    python benchmarks/gpu_check.py --only attention replay_torch
    python benchmarks/gpu_check.py --list

Checks of computations run beside each other (`--jobs`); what is timed, and runs that lease the GPU, run alone. The
report is written after each check, so that a lost machine leaves what was found. Exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from gpu_checks import engines, kernels, machine, models, peers, runs, sglang, speed
from gpu_checks.frame import CHECKS, Outcome, Place, end_running, run_apart, run_here
from gpu_checks.report import summary, write
from rich.console import Console
from rich.markup import escape

from relax_actors.isolation.orphans import die_with_parent

MODULES = (machine, kernels, engines, models, runs, sglang, speed, peers)
"""Modules whose checks register themselves."""
ORDER = [name for module in MODULES for name, one in CHECKS.items() if one.run.__module__ == module.__name__]
"""Names of all checks in the order of the report."""


def has_gpu() -> bool:
    """Return whether torch computes on a GPU here; asked in another process, so that none is held by this one."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False).returncode == 0


def run_all(names: list[str], options: argparse.Namespace, scratch: Path, console: Console) -> list[Outcome]:
    """Run the checks and write the report after each one. Checks that must run alone come last."""
    began, found = time.monotonic(), dict[str, Outcome]()
    logs: Path = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    def done(outcome: Outcome) -> None:
        found[outcome.check] = outcome
        write([found[name] for name in names if name in found], options.out, time.monotonic() - began)
        why = f": {outcome.reason.splitlines()[-1]}" if outcome.reason else ""
        console.print(f"{outcome.seconds:6.1f} s  {outcome.result:7}  {outcome.check}{escape(why)}", highlight=False)

    def one(name: str) -> Outcome:
        return run_apart(name, Place(options.device, options.short, scratch / name), logs)

    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for future in as_completed([pool.submit(one, name) for name in names if not CHECKS[name].is_alone]):
                done(future.result())
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            end_running()
            raise
    for name in names:
        if CHECKS[name].is_alone:
            done(one(name))
    return [found[name] for name in names]


def main() -> int:
    """Run the checks that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=ORDER, metavar="CHECK", help="these checks")
    parser.add_argument("--without", nargs="+", choices=ORDER, metavar="CHECK", default=[])
    parser.add_argument("--short", action="store_true", help="the smallest sizes")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    parser.add_argument("--jobs", type=int, help="checks that run at once", default=None)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the report")
    parser.add_argument("--list", action="store_true", help="name the checks")
    parser.add_argument("--here", nargs=3, metavar=("CHECK", "FOLDER", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    if options.list:
        for name in ORDER:
            console.print(f"{name:22} {CHECKS[name].about}", highlight=False)
        return 0
    if options.here:  # with --device
        die_with_parent(os.getppid())
        name, folder, result = options.here
        run_here(name, Place(options.device, options.short, Path(folder)), Path(result))
        return 0
    options.device = options.device or ("cuda" if has_gpu() else "cpu")
    options.jobs = options.jobs or max(1, min(4, (os.cpu_count() or 1) // 2))
    chosen = options.only or [name for name in ORDER if CHECKS[name].is_short or not options.short]
    names = [name for name in ORDER if name in chosen and name not in options.without]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as by Ctrl-C, with the logs of what still runs
    scratch = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        outcomes = run_all(names, options, scratch, console)
    except KeyboardInterrupt:
        console.print("stopped; what had ended is in the report", highlight=False)
        return 130
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    console.print(f"{summary(outcomes)}; {options.out / 'gpu-check.md'}", highlight=False)
    return int(any(outcome.result == "fail" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
