"""The command line: each verb imports what it needs only when it is called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from relax_actors.errors import BrokerError, ConfigError, RelaxError

app = typer.Typer(
    help="Reinforcement-learning post-training as an actor system on NATS JetStream.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

quarantine = typer.Typer(help="Rows that hurt whoever handled them.", no_args_is_help=True)
app.add_typer(quarantine, name="quarantine")

ConfigPath = Annotated[Path, typer.Argument(help="TOML file, e.g. examples/demo/demo.toml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value ...", metavar="[SETTING]...")]
RunName = Annotated[str, typer.Argument(help="run name, or its folder", metavar="RUN")]


@app.command()
def up(
    config: ConfigPath,
    settings: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="print the result as one last line of JSON")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no live progress")] = False,
    roles: Annotated[str | None, typer.Option(help="only these here, e.g. prompts,trainer; see `relax node`")] = None,
    must_finish: Annotated[bool, typer.Option("--must-finish", help="exit code 1 if told to stop before")] = False,
) -> None:
    """Train: start a run, or resume it where it stood.

    Exit code 0 when it is finished or was stopped in order, 1 when supervision gave up, 2 for a configuration error.
    """
    from relax_actors.cli.up import up as run_up

    here = None if roles is None else [role for role in roles.split(",") if role]
    code = run_up(config, settings or [], as_json=json, quiet=quiet, roles=here, must_finish=must_finish)
    raise typer.Exit(code)


@app.command()
def node(
    broker: Annotated[str, typer.Option(help="nats://host:port of the run's broker")],
    role: Annotated[list[str], typer.Option(help="role=number, e.g. rollout=2; may be given again")],
    store: Annotated[Path, typer.Option(help="the run's store, as it is seen here; {run} stands for its name")],
    settings: Overrides = None,
    run: Annotated[str | None, typer.Option(help="name of the run; that of the credentials if not given")] = None,
    credentials: Annotated[Path | None, typer.Option(help="a folder of `relax keys`, or a .creds file")] = None,
    ca: Annotated[Path | None, typer.Option(help="certificate of the broker's authority")] = None,
    folder: Annotated[Path | None, typer.Option(help="the run's folder, as it is seen here; that above STORE")] = None,
    work: Annotated[Path | None, typer.Option(help="folder of this node alone, for logs")] = None,
    name: Annotated[str | None, typer.Option(help="of this node; that of the machine if not given")] = None,
    code: Annotated[Path | None, typer.Option(help="where the run's own modules are found here")] = None,
    stay: Annotated[bool, typer.Option("--stay", help="when the run is over, wait for it to go on")] = False,
) -> None:
    """Join a run from anywhere with some actors; SIGTERM leaves it in order.

    Exit code 0 when the run is over or the node was told to leave, 1 when an actor cannot be kept up, 2 for a mistake.
    """
    from relax_actors.cli.node import Joining, join

    place = Joining(broker, credentials, ca, run, name, work, stay)
    raise typer.Exit(join(place, role, store, folder, code, settings or []))


@app.command()
def check(config: ConfigPath, settings: Overrides = None) -> None:
    """Check a configuration without starting anything, and print it resolved."""
    from relax_actors.cli.check import check as run_check

    raise typer.Exit(run_check(config, settings or []))


@app.command()
def simulate(
    config: ConfigPath,
    settings: Overrides = None,
    split: Annotated[bool, typer.Option("--split", help="search the best split of devices too")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the result as one last line of JSON")] = False,
) -> None:
    """Predict a cluster that one does not have: the real actors and table, with engines that only take time.

    CONFIG has a section "simulate"; see docs/simulate.md.
    """
    from relax_actors.cli.simulate import simulate as run_simulate

    raise typer.Exit(run_simulate(config, settings or [], split=split, as_json=json))


@app.command()
def tail(
    subject: Annotated[str, typer.Argument(help="NATS subject, wildcards allowed, e.g. 'relax.demo.event.>'")],
    run: Annotated[str | None, typer.Option(help="run name or folder; taken from the subject if not given")] = None,
    history: Annotated[bool, typer.Option("--history", help="begin with what is stored, not with what comes")] = False,
    count: Annotated[int, typer.Option(help="end after so many messages; 0 never ends")] = 0,
) -> None:
    """Print the messages of a subject as they come: events, metrics and cells."""
    from relax_actors.cli.tail import tail as run_tail

    run_tail(subject, run, history=history, count=count)


@app.command()
def monitor(
    run: Annotated[str | None, typer.Argument(help="run name, or its folder", metavar="[RUN]")] = None,
    broker: Annotated[str | None, typer.Option(help="nats://host:port of a run elsewhere")] = None,
    credentials: Annotated[Path | None, typer.Option(help="a folder of `relax keys`, or an observer's .creds")] = None,
    ca: Annotated[Path | None, typer.Option(help="certificate of the broker's authority")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="write for TensorBoard into this folder")] = None,
    prometheus: Annotated[str | None, typer.Option(help="serve /metrics at [HOST:]PORT")] = None,
    wandb: Annotated[str | None, typer.Option(help="log to this project of Weights & Biases")] = None,
    count: Annotated[int, typer.Option(help="end after so many messages; 0 ends with the run")] = 0,
) -> None:
    """Show a run live, heard through its broker alone: reward, loss, KL, staleness, rows, actors, events."""
    from relax_actors.cli.monitor import locate
    from relax_actors.cli.monitor import monitor as run_monitor
    from relax_actors.monitoring.sinks import Sink
    from relax_actors.monitoring.sinks.prometheus import Prometheus
    from relax_actors.monitoring.sinks.tensorboard import TensorBoard
    from relax_actors.monitoring.sinks.wandb import WeightsAndBiases

    name, address = locate(run, broker, credentials, ca)
    sinks: list[Sink] = []
    if tensorboard is not None:
        sinks.append(TensorBoard(tensorboard))
    if prometheus is not None:
        sinks.append(Prometheus(prometheus))
    if wandb is not None:
        sinks.append(WeightsAndBiases(wandb, name))
    run_monitor(name, address, sinks, count=count)


@app.command()
def status(
    run: RunName,
    json: Annotated[bool, typer.Option("--json", help="as one line of JSON")] = False,
) -> None:
    """Show where a run stands, read through its broker only."""
    from relax_actors.cli.inspect import status as run_status

    run_status(run, as_json=json)


@app.command()
def ledger(
    run: RunName,
    json: Annotated[bool, typer.Option("--json", help="as one line of JSON")] = False,
) -> None:
    """Account for every row of a run, live or over: exit code 1 if one is lost or trained twice."""
    from relax_actors.cli.inspect import ledger as run_ledger

    raise typer.Exit(run_ledger(run, as_json=json))


@app.command()
def tree(run: RunName) -> None:
    """Show the supervision tree: who lives since when, and what each waits for."""
    from relax_actors.cli.inspect import tree as run_tree

    run_tree(run)


@app.command()
def scale(
    run: RunName,
    roles: Annotated[list[str], typer.Argument(help="role=number ...", metavar="ROLE=NUMBER...")],
    node: Annotated[str | None, typer.Option(help="number or name of the node whose actors are meant")] = None,
) -> None:
    """Have more or fewer actors of a role while the run is up; those too many finish what they have in hand."""
    from relax_actors.cli.scale import scale as run_scale

    for role, number in run_scale(run, roles, node).items():
        typer.echo(f"{role}: {number} actors")


@app.command()
def keys(
    run: Annotated[str, typer.Argument(help="a configuration, a run's name, or its folder", metavar="RUN")],
    folder: Annotated[Path, typer.Argument(help="where to write them", metavar="DIR")],
    settings: Overrides = None,
    tls: Annotated[bool, typer.Option("--tls", help="also a certificate authority, and certificates")] = False,
    mutual: Annotated[bool, typer.Option("--mutual", help="as --tls; the server asks clients for theirs too")] = False,
    host: Annotated[list[str] | None, typer.Option(help="name or address of the server, for its certificate")] = None,
    days: Annotated[float | None, typer.Option(help="refuse the credentials after so many days")] = None,
    renew: Annotated[bool, typer.Option("--renew", help="have all credentials refused that were given before")] = False,
    listen: Annotated[str, typer.Option(help="where the server listens")] = "0.0.0.0:4222",
    websocket: Annotated[int | None, typer.Option(help="port of the server for WebSocket clients")] = None,
    store: Annotated[Path | None, typer.Option(help="where the server keeps its files; DIR/server/store")] = None,
    cluster: Annotated[str | None, typer.Option(help="names of a cluster's servers, e.g. nats-1,nats-2,nats-3")] = None,
    http: Annotated[int | None, typer.Option(help="port of the server's figures, which anybody may read")] = None,
) -> None:
    """Make credentials for each role, an operator and an observer, and the configuration of their server.

    Run again it makes the users anew, and keeps the server's own keys.
    """
    from relax_actors.cli.keys import Settings, make_keys

    servers = tuple((cluster or "").split(",")) if cluster else ()
    chosen = Settings(tls or mutual, mutual, tuple(host or ()), days, renew, listen, websocket, store, servers, http)
    for line in make_keys(run, folder, settings or [], chosen):
        typer.echo(line)


@quarantine.command("list")
def quarantine_list(
    run: RunName,
    json: Annotated[bool, typer.Option("--json", help="one line of JSON a row")] = False,
) -> None:
    """List the rows that were quarantined."""
    from relax_actors.cli.quarantine import list_rows

    list_rows(run, as_json=json)


@quarantine.command("show")
def quarantine_show(
    run: RunName, row: Annotated[str, typer.Argument(help="a row, e.g. group.12.3", metavar="ROW")]
) -> None:
    """Show a quarantined row with its inputs and traceback."""
    from relax_actors.cli.quarantine import show_row

    show_row(run, row)


@quarantine.command("requeue")
def quarantine_requeue(
    run: RunName,
    rows: Annotated[list[str] | None, typer.Argument(help="rows, e.g. group.12.3", metavar="[ROW]...")] = None,
    everything: Annotated[bool, typer.Option("--all", help="all that are quarantined")] = False,
) -> None:
    """Have the tasks of quarantined rows admitted again, as new rows, once what hurt them is mended."""
    from relax_actors.cli.quarantine import requeue

    typer.echo(f"{requeue(run, rows or [], everything=everything)} rows will be admitted again")


@app.command()
def chaos(
    run: RunName,
    kill: Annotated[str | None, typer.Option(help="a role, role/number, any, server, node or broker")] = None,
    hang: Annotated[str | None, typer.Option(help="stop such a process, without ending it")] = None,
    disk_full: Annotated[float | None, typer.Option(help="fill the run's file system for so many seconds")] = None,
    corrupt_segment: Annotated[str | None, typer.Option(help="truncate, flip, delete or any: damage a file")] = None,
    every: Annotated[float, typer.Option(help="mean seconds between faults")] = 5.0,
    count: Annotated[int, typer.Option(help="how many")] = 1,
    seed: Annotated[int, typer.Option(help="of the choice of victims and pauses")] = 0,
    signal: Annotated[str, typer.Option(help="of --kill: KILL, STOP or TERM")] = "KILL",
) -> None:
    """Hurt a live run on this machine: one kind of real fault, each told in an event."""
    from signal import SIGKILL, SIGSTOP, SIGTERM

    from relax_actors.cli import faults
    from relax_actors.cli.chaos import Schedule
    from relax_actors.cli.chaos import chaos as run_chaos

    if sum(option is not None for option in (kill, hang, disk_full, corrupt_segment)) != 1:
        msg = "choose one of --kill, --hang, --disk-full and --corrupt-segment"
        raise ConfigError(msg)
    numbers = {"KILL": SIGKILL, "STOP": SIGSTOP, "TERM": SIGTERM}
    if signal.upper() not in numbers:
        msg = f"--signal {signal!r} is none of {', '.join(numbers)}"
        raise ConfigError(msg)
    if corrupt_segment not in (None, "any", *faults.Damage):
        msg = f"--corrupt-segment {corrupt_segment!r} is none of any, {', '.join(faults.Damage)}"
        raise ConfigError(msg)
    if kill is not None:
        fault = faults.signalling(kill, numbers[signal.upper()])
    elif hang is not None:
        fault = faults.signalling(hang, SIGSTOP)
    elif disk_full is not None:
        fault = faults.filling_disk(disk_full)
    else:
        fault = faults.damaging(None if corrupt_segment == "any" else faults.Damage(corrupt_segment or ""))
    typer.echo(f"{run_chaos(run, fault, Schedule(every, count, seed))} of {count} faults done")


@app.command()
def fingerprint(
    path: Annotated[Path, typer.Argument(help="checkpoint, model folder or safetensors file")],
) -> None:
    """Print the digest that says whether two runs ended with the same weights."""
    from relax_actors.cli.inspect import fingerprint as run_fingerprint

    typer.echo(run_fingerprint(path))


def run() -> None:
    """Entry point: errors of ours become one message and an exit code."""
    try:
        app()
    except ConfigError as error:
        sys.stderr.write(f"relax: {error}\n")
        sys.exit(2)
    except BrokerError as error:
        sys.stderr.write(f"relax: {error}\n")
        sys.exit(1)
    except RelaxError as error:
        sys.stderr.write(f"relax: {type(error).__name__}: {error}\n")
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(0)


if __name__ == "__main__":
    run()
