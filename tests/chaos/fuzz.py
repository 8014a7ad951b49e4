"""Flood runs with malformed messages: `python -m tests.chaos.fuzz [--count N] [--seed S] [--rounds R]`.

Each round is a run of its own. It must end as if nothing had happened: every step trained, no actor died, the ledger
holds, and each malformed cell that an actor reads is quarantined, dropped, removed or of no row that anybody wants.
Prints what became of the messages; exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support.flooding import Counts, flooded


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="messages, over all rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run")
    parser.add_argument("--rate", type=float, default=1e9, help="messages a second, at most")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    given = parser.parse_args()
    total: Counts = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(given.rounds):
            began, seed = time.monotonic(), given.seed + i
            share = given.count // given.rounds
            counts, wrong = flooded(folder, f"fuzz{i}", seed, share, steps=given.steps, rate=given.rate)
            total += counts
            failures += [f"seed {seed}: {text}" for text in wrong]
            state = "ok" if not wrong else f"{len(wrong)} failures"
            say(f"seed {seed}: {share} messages, {time.monotonic() - began:.0f} s, {state}")
    for kind, answer in sorted(total):
        say(f"{kind:24} {answer:32} {total[kind, answer]:9}")
    for text in failures[:50]:
        say(text[:2000])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
