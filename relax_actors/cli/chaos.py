"""`relax chaos`: real faults in a live run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import RunName
from relax_actors.errors import ConfigError

if TYPE_CHECKING:
    from relax_actors.cli.faults import Fault


def chaos(
    run: RunName,
    kill: Annotated[
        str | None, typer.Option(help="Signal a process: role, role/number, any, server, node or broker.")
    ] = None,
    hang: Annotated[str | None, typer.Option(help="Stop a process (SIGSTOP) without ending it.")] = None,
    disk_full: Annotated[float | None, typer.Option(help="Seconds for which to fill the run's file system.")] = None,
    corrupt_segment: Annotated[
        str | None, typer.Option(help="Damage a file of the store: truncate, flip, delete or any.")
    ] = None,
    every: Annotated[float, typer.Option(help="Mean seconds between faults.")] = 5.0,
    count: Annotated[int, typer.Option(help="Number of faults.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the choice of victims and pauses.")] = 0,
    signal: Annotated[str, typer.Option(help="Signal of --kill: KILL, STOP or TERM.")] = "KILL",
) -> None:
    """Inject faults into a live run on this machine.

    Each fault is logged as an event.
    """
    from relax_actors.cli.faults import Schedule, inject

    fault = _fault(kill, hang, disk_full, corrupt_segment, signal)
    typer.echo(f"{inject(run, fault, Schedule(every, count, seed))} of {count} faults done")


def _fault(kill: str | None, hang: str | None, disk_full: float | None, corrupt: str | None, signal: str) -> Fault:
    from signal import SIGKILL, SIGSTOP, SIGTERM

    from relax_actors.cli import faults

    if sum(option is not None for option in (kill, hang, disk_full, corrupt)) != 1:
        msg = "choose one of --kill, --hang, --disk-full and --corrupt-segment"
        raise ConfigError(msg)
    signals = {"KILL": SIGKILL, "STOP": SIGSTOP, "TERM": SIGTERM}
    if signal.upper() not in signals:
        msg = f"--signal {signal!r} is unknown; choose one of {', '.join(signals)}"
        raise ConfigError(msg)
    if kill is not None:
        return faults.signalling(kill, signals[signal.upper()])
    if hang is not None:
        return faults.signalling(hang, SIGSTOP)
    if disk_full is not None:
        return faults.filling_disk(disk_full)
    if corrupt not in ("any", *faults.Damage):
        msg = f"--corrupt-segment {corrupt!r} is unknown; choose one of any, {', '.join(faults.Damage)}"
        raise ConfigError(msg)
    return faults.damaging(None if corrupt == "any" else faults.Damage(corrupt or ""))
