"""`relax traces export | check`: recorded samples as files, and their checks."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import typer

from relax_actors.cli.options import AsJson, Broker, Credentials, RunName

SHOWN = 20
"""Traces with errors that are listed."""

traces = typer.Typer(help="Export the recorded samples of a run, and check files of samples.", no_args_is_help=True)


@traces.command("export")
def export(
    run: RunName,
    out: Annotated[
        Path,
        typer.Argument(help="New file *.parquet or *.jsonl, or for JSON a new folder of documents.", metavar="OUT"),
    ],
    kind: Annotated[str, typer.Option("--format", help="atif, verifiers, openenv or parquet.")] = "parquet",
    step: Annotated[list[int] | None, typer.Option(help="Rows of this step; may be repeated. Default: all.")] = None,
    json: AsJson = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Write the samples of trained rows with tokens, masks, log-probs and rewards, bit for bit.

    Reads the rows that the table still has, those since the last checkpoint, and before them the rows that [record]
    keeps. Exit code 1 if there are none.
    """
    from relax_actors.counted import counted
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected
    from relax_actors.monitoring.traces import RunTraces
    from relax_actors.printable import printable
    from relax_actors.record.record import Record
    from relax_actors.traces.write import check_output, write_records

    check_output(out, kind)
    with connected(run, Access(broker, credentials)) as at:
        slots = at.config.trainer.prompts_per_step
        run_traces = RunTraces(at.table, Record(at.folder.record), at.settings.run.name, kind, slots, step or ())
        count = write_records(out, kind, run_traces)
    for line in run_traces.unreadable:
        sys.stderr.write(printable(f"relax: left out {line}") + "\n")
    if run_traces.lacking:
        sys.stderr.write(
            f"relax: left out {counted(len(run_traces.lacking), 'row')} that the table has deleted, such as "
            f"{run_traces.lacking[0]}; record.every = 1 and a larger record.max_mib keep the rows of all steps\n"
        )
    if not count:
        where = f"of the steps {', '.join(map(str, step))} " if step else ""
        out.unlink() if out.is_file() else out.rmdir()
        sys.stderr.write(
            f"relax: run {run} has no trained rows {where}to write: the table keeps rows until the next checkpoint; a "
            "larger trainer.checkpoint_every keeps them longer, and record.every = 1 keeps the rows of all steps\n"
        )
        raise typer.Exit(1)
    if json:
        body = {
            "rows": run_traces.rows,
            "traces": count,
            "lacking": len(run_traces.lacking),
            "unreadable": len(run_traces.unreadable),
        }
        sys.stdout.write(json_module.dumps(body) + "\n")
    else:
        sys.stdout.write(f"{counted(run_traces.rows, 'row')}, {counted(count, 'trace')}: {printable(str(out))}\n")


@traces.command("check")
def check(
    path: Annotated[Path, typer.Argument(help="File, folder or pattern of traces.", metavar="FILE")],
    model: Annotated[Path | None, typer.Option(help="Folder of a model, whose tokens and texts are compared.")] = None,
    json: AsJson = False,
) -> None:
    """Check ids, masks, log-probs and, with --model, texts; exit code 1 if one is not exact."""
    from relax_actors.counted import counted
    from relax_actors.data.trace_check import examine_files
    from relax_actors.printable import printable

    examined = examine_files(path, model)
    if json:
        sys.stdout.write(json_module.dumps(examined.body()) + "\n")
    else:
        for error in examined.errors[:SHOWN]:
            sys.stdout.write(printable(error) + "\n")
        if len(examined.errors) > SHOWN:
            sys.stdout.write(f"... and {len(examined.errors) - SHOWN} more\n")
        formats = ", ".join(sorted(examined.formats)) or "no format"
        sys.stdout.write(
            f"{counted(examined.traces, 'trace')} ({formats}) in {counted(examined.rows, 'row')}, "
            f"{counted(len(examined.errors), 'error')}; {examined.trained} of {examined.tokens} tokens are trained, "
            f"{examined.without_reward} without reward\n"
        )
    if examined.errors:
        raise typer.Exit(1)
