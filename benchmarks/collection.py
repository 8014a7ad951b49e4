"""Measure the broker's CPU time for removing the rows that a checkpoint covers, by step and by index.

The table has the consumers of the demo and four cells of each row. Removals are interleaved.

    python benchmarks/collection.py [--steps 200] [--repeats 3]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from overhead import DEMO, TICKS

from broker.connection import Connection
from broker.server import Server
from broker.store import Store
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.supervision.streams import ensure_run_streams
from relax_actors.training.strays import FIRST_COLUMNS, Extent, removal

COLUMNS, ROWS, LEAD = ("prompt", "trajectory", "reward", "advantage"), 16, 1


def cpu_ms(pid: int) -> float:
    """CPU time of a process in milliseconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1e3 / TICKS


def measure(table: Table, pid: int, steps: int, *, in_bulk: bool) -> float:
    """Write the rows, remove those below the floor, and return the broker's milliseconds for the removal."""
    subjects = table.subjects
    for step in range(steps):
        cells = [subjects.cell(RowId(step, index), column) for column in COLUMNS for index in range(ROWS)]
        table.put_encoded([(cell, b"x" * 200) for cell in cells])
    begin = cpu_ms(pid)
    listed = table.list_cells(f"{subjects.prefix}.group.*.*.*")
    first = [cell for cell in listed if cell.field in FIRST_COLUMNS]
    extent = Extent(10**6, ROWS, LEAD, steps, steps, 0, lambda _: False, frozenset())
    todo = removal(listed, first, extent)
    for filters in (todo.bulk if in_bulk else (), todo.filters):
        table.purge(f"{subjects.prefix}.{name}" for name in filters)
    return cpu_ms(pid) - begin


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        server = Server(Path(scratch) / "broker")
        with closing(Connection(server.start(), "bench")) as connection:
            config = load_config(DEMO, [])
            connection.call(ensure_run_streams(connection, config), 60)
            table = Table(connection, Subjects(config.run.name), Store(Path(scratch) / "store"), "bench.0#1")
            if server.process is None:
                sys.exit("the broker did not start")
            found: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(options.repeats):
                for in_bulk, times in found.items():
                    times.append(measure(table, server.process.pid, options.steps, in_bulk=in_bulk))
        server.stop()
    by_step, by_index = (statistics.median(times) for times in found.values())
    print(f"{options.steps} steps of {ROWS} rows, CPU ms of the broker: {by_step:.0f} by step, {by_index:.0f} by index")


if __name__ == "__main__":
    main()
