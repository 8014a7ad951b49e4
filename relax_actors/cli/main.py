"""Entry point `relax`: the table of commands, and the commands of other distributions.

To add a command, write a module with a typed function (or a `typer.Typer` with subcommands) and add its line to
`COMMANDS`. Another distribution adds one by an entry point of the group `relax_actors.commands`, whose name is the
name of the command:

    [project.entry-points."relax_actors.commands"]
    export = "my_package.export:export"
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any, NoReturn

import typer

from relax_actors.errors import BrokerError, ConfigError, RelaxError
from relax_actors.registry.dotted import load
from relax_actors.registry.plugins import distribution_of, entry_points_of, load_entry_point

GROUP = "relax_actors.commands"
COMMANDS = {
    "up": "relax_actors.cli.up:up",
    "check": "relax_actors.cli.check:check",
    "simulate": "relax_actors.cli.simulate:simulate",
    "status": "relax_actors.cli.status:status",
    "tree": "relax_actors.cli.tree:tree",
    "ledger": "relax_actors.cli.ledger:ledger",
    "monitor": "relax_actors.cli.monitor:monitor",
    "tail": "relax_actors.cli.tail:tail",
    "scale": "relax_actors.cli.scale:scale",
    "quarantine": "relax_actors.cli.quarantine:quarantine",
    "chaos": "relax_actors.cli.chaos:chaos",
    "keys": "relax_actors.cli.keys:keys",
    "node": "relax_actors.cli.node:node",
    "fingerprint": "relax_actors.cli.fingerprint:fingerprint",
}


def build(arguments: list[str]) -> typer.Typer:
    """Build the application for one command line.

    Other distributions are loaded only if the first argument names no built-in command, so that a distribution that
    imports torch, or fails to import, affects no built-in command.
    """
    app = typer.Typer(
        help="Reinforcement-learning post-training as an actor system on NATS JetStream.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name, path in COMMANDS.items():
        _add(app, name, load(path, f"command {name}"))
    if not arguments or arguments[0] not in COMMANDS:
        for name, entry in sorted(entry_points_of(GROUP).items()):
            _add_entry_point(app, name, entry)
    return app


def _add(app: typer.Typer, name: str, command: Any) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


def _add_entry_point(app: typer.Typer, name: str, entry: EntryPoint) -> None:
    """Add the command of another distribution; if it cannot be used, a command that reports the reason."""
    if name in COMMANDS:
        where = distribution_of(entry)
        sys.stderr.write(f"relax: command {name!r} of {where} is ignored: a built-in command has this name\n")
        return
    try:
        command = load_entry_point(entry)
        if not (isinstance(command, typer.Typer) or callable(command)):
            msg = f"{entry.value} is neither a function nor a typer.Typer"
            raise TypeError(msg)
    except (ConfigError, TypeError) as error:
        unusable = {"ignore_unknown_options": True, "allow_extra_args": True}
        app.command(name, help="(cannot be loaded)", context_settings=unusable)(_failing(str(error)))
    else:
        _add(app, name, command)


def _failing(reason: str) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise ConfigError(reason)

    return fail


def run() -> None:
    """Run a command; report an error as one message and an exit code: 2 for a configuration error, else 1."""
    try:
        build(sys.argv[1:])()
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
