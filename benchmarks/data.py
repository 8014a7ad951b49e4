"""Measure data sources of many rows: time to the first row, memory, and rows a second in the order of a run.

    python benchmarks/data.py --rows 1000000

Each source is opened in a process of its own. `first row` is the time to open the source and to read the first row of
the run; `memory` is what the process has in addition after `--read` rows in the run's order, of which pages of mapped
files, which the system takes back when it needs them, are `mapped`. Exit code 1 if a first row takes longer than
`--limit` seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KINDS = ("jsonl", "parquet", "arrow", "mixture")
GROUP = 10_000
"""Rows of a row group and of a record batch."""


def row(i: int) -> dict[str, Any]:
    """Row of about 200 bytes."""
    text = f"A farmer has {i} sheep and sells a seventh of them. How many coins does he get at {i % 97} coins a sheep?"
    return {"question": text, "answer": str(i // 7 * (i % 97)), "level": i % 5}


def write(folder: Path, rows: int) -> None:
    """Write the rows in each format, in four files."""
    import pyarrow as pa  # noqa: PLC0415 the extra `parquet`
    import pyarrow.parquet as pq  # noqa: PLC0415

    share = rows // 4
    for part in range(4):
        own = [row(i) for i in range(part * share, (part + 1) * share)]
        (folder / f"{part}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in own))
        table = pa.Table.from_pylist(own)
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=GROUP)
        with pa.ipc.new_stream(str(folder / f"{part}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=GROUP)


def settings_of(kind: str, folder: Path) -> dict[str, Any]:
    """Section [data] of a kind."""
    fields = {"prompt": "question"}
    if kind != "mixture":
        return {"kind": kind, "path": str(folder), "fields": fields}
    parts = {
        name: settings_of(name, folder) | {"weight": weight} for name, weight in (("jsonl", 0.6), ("parquet", 0.4))
    }
    return {"kind": "mixture", "mixture": parts}


def memory() -> tuple[float, float]:
    """MiB of this process: private, and of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if name[:3] == "Rss"}
    return kib["RssAnon"] / 1024, (kib["RssFile"] + kib["RssShmem"]) / 1024


def measure(kind: str, folder: Path, read: int) -> dict[str, float]:
    """Open a source and read rows in the order of a run; runs in a process of its own."""
    from broker.subjects import RowId  # noqa: PLC0415 imports are not measured
    from relax_actors.config import validate  # noqa: PLC0415
    from relax_actors.data.prompt_maker import open_data  # noqa: PLC0415
    from relax_actors.runtime.row_order import RowOrder  # noqa: PLC0415

    config = validate({"model": {"path": str(folder)}, "data": settings_of(kind, folder)}, "benchmark")
    size = config.trainer.prompts_per_step
    private, mapped = memory()
    began = time.perf_counter()
    source = open_data(config.data)
    order = RowOrder(config, source)
    _ = source[order.item(RowId(0, 0))]
    first = time.perf_counter() - began
    began = time.perf_counter()
    for i in range(read):
        _ = source[order.item(RowId(*divmod(i, size)))]
    seconds = time.perf_counter() - began
    after, mapped_after = memory()
    return {
        "rows": len(source),
        "first_row_s": round(first, 3),
        "rows_per_s": round(read / seconds),
        "memory_mib": round(after - private, 1),
        "mapped_mib": round(mapped_after - mapped, 1),
    }


def main() -> None:
    """Measure each kind of source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--read", type=int, default=50_000)
    parser.add_argument("--limit", type=float, default=2.0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        kind, folder = arguments.measure
        print(json.dumps(measure(kind, Path(folder), arguments.read)))
        return
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), arguments.rows)
        for kind in arguments.kinds:
            command = [sys.executable, __file__, "--read", str(arguments.read), "--measure", kind, folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            own = figures[kind] = json.loads(done.stdout)
            print(
                f"{kind:<8} {own['rows']} rows: first row after {own['first_row_s']:.3f} s, "
                f"{own['rows_per_s']} rows/s, memory +{own['memory_mib']} MiB, mapped +{own['mapped_mib']} MiB",
                file=sys.stderr if arguments.json else sys.stdout,
            )
    if arguments.json:
        print(json.dumps(figures))
    sys.exit(any(own["first_row_s"] > arguments.limit for own in figures.values()))


if __name__ == "__main__":
    main()
