"""Command `python -m relax_actors.algorithms.evaluate FILE.json`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from relax_actors.algorithms.evaluate.kinds import evaluate


def main() -> int:
    """Evaluate a file's cases and print results; 1 if one failed, 2 if unreadable."""
    parser = argparse.ArgumentParser(prog="relax_actors.algorithms.evaluate", description=__doc__)
    parser.add_argument("file", help="JSON file with a list of cases; - reads standard input")
    path = parser.parse_args().file
    try:
        read = json.loads(sys.stdin.read() if path == "-" else Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        return _refuse(path, str(error))
    cases = read.get("cases") if isinstance(read, dict) else read
    if not isinstance(cases, list):
        return _refuse(path, "the file holds no list of cases")
    results = evaluate(cases)
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return 1 if any("error" in result for result in results) else 0


def _refuse(path: str, why: str) -> int:
    sys.stderr.write(f'{path}: {why}; write a JSON list of cases, or {{"cases": [...]}}\n')
    return 2


if __name__ == "__main__":
    sys.exit(main())
