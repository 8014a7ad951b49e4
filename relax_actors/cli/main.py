"""Entry point `relax`: the table of commands, and the commands of other distributions.

To add a command, write a module with a typed function (or a `typer.Typer` with subcommands) and add its line to
`COMMANDS`. Another distribution adds one by an entry point of the group `relax_actors.commands`, whose name is the
name of the command:

    [project.entry-points."relax_actors.commands"]
    export = "my_package.export:export"
"""

from __future__ import annotations

import atexit
import gc
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import setproctitle
import typer
from typer.core import TyperCommand, TyperGroup

from broker.lean_imports import skip_optional_imports
from relax_actors.errors import AddressError, BrokerError, ConfigError, RelaxError, SubjectError
from relax_actors.printable import printable_lines
from relax_actors.registry import Registry

# typer validates every parameter by pydantic, `--help` and parameters that are not given included. Where a command has
# nothing else to validate, the import of pydantic takes a fifth of its time.
PLAIN: dict[Any, Callable[[Any], Any]] = {bool: bool, str: str, Path: Path, list[str]: list}
"""Types of parameters whose values cannot be wrong, and how to make them of what the command line has."""


@dataclass(frozen=True, slots=True)
class _Plain:
    """Stands for the validation of a parameter."""

    make: Callable[[Any], Any]

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        del ctx
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        return self.make(value)


def _taken_as_given(parameters: list[Any]) -> list[Any]:
    """Keep typer from validating plain parameters."""
    for parameter in parameters:
        annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
        if annotation in PLAIN:
            parameter._runtime_param = _Plain(PLAIN[annotation])  # noqa: SLF001
    return parameters


class PlainCommand(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, `--help` included."""
        return _taken_as_given(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """A command with subcommands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, `--help` included."""
        return _taken_as_given(super().get_params(ctx))


ALLOCATIONS = 200_000
"""Allocations after which garbage is collected: imports make many objects that stay, and Python looks every 700."""

COMMANDS: Registry[Any] = Registry(
    "command",
    "relax_actors.commands",
    {
        "up": "relax_actors.cli.up:up",
        "check": "relax_actors.cli.check:check",
        "eval": "relax_actors.cli.eval:eval",
        "compare": "relax_actors.cli.compare:compare",
        "algorithms": "relax_actors.cli.algorithms:algorithms",
        "simulate": "relax_actors.cli.simulate:simulate",
        "status": "relax_actors.cli.status:status",
        "doctor": "relax_actors.cli.doctor:doctor",
        "tree": "relax_actors.cli.tree:tree",
        "ledger": "relax_actors.cli.ledger:ledger",
        "samples": "relax_actors.cli.samples:samples",
        "traces": "relax_actors.cli.traces:traces",
        "monitor": "relax_actors.cli.monitor:monitor",
        "console": "relax_actors.cli.console:console",
        "notify": "relax_actors.cli.notify:notify",
        "tail": "relax_actors.cli.tail:tail",
        "timeline": "relax_actors.cli.timeline:timeline",
        "profile": "relax_actors.cli.profile:profile",
        "scale": "relax_actors.cli.scale:scale",
        "operations": "relax_actors.cli.operations:operations",
        "roles": "relax_actors.cli.roles:roles",
        "quarantine": "relax_actors.cli.quarantine:quarantine",
        "chaos": "relax_actors.cli.chaos:chaos",
        "keys": "relax_actors.cli.keys:keys",
        "node": "relax_actors.cli.node:node",
        "fingerprint": "relax_actors.cli.fingerprint:fingerprint",
        "replay": "relax_actors.cli.replay:replay",
        "branch": "relax_actors.cli.branch:branch",
        "diff": "relax_actors.cli.diff:diff",
        "provenance": "relax_actors.cli.provenance:provenance",
        "slurm": "relax_actors.cli.slurm:slurm",
        "kubernetes": "relax_actors.cli.kubernetes:kubernetes",
    },
)


def build(arguments: list[str]) -> typer.Typer:
    """Build the application for one command line.

    If the first argument names a built-in command, this one alone is loaded: no other command, nor one of another
    distribution that imports torch or fails to import, costs it time or affects it.
    """
    app = typer.Typer(
        cls=PlainGroup,
        help="Reinforcement-learning post-training as an actor system on NATS JetStream.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(help=app.info.help)(_main_options)
    if arguments and arguments[0] in COMMANDS.built_in:
        _add(app, arguments[0], COMMANDS.load(arguments[0], "command"))
        return app
    try:
        COMMANDS.check_installed()
    except ConfigError as error:
        sys.stderr.write(printable_lines(f"relax: warning: {error}") + "\n")
    for name in COMMANDS.names():
        if name in COMMANDS.built_in:
            _add(app, name, COMMANDS.load(name, "command"))
        else:
            _add_installed(app, name)
    return app


def _print_versions(wanted: bool) -> None:  # noqa: FBT001 signature of typer
    if wanted:
        from relax_actors.cli.version import versions

        typer.echo(versions())
        raise typer.Exit


def _main_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_versions, help="Print the versions of relax and its main parts."
        ),
    ] = False,
) -> None:
    """Options of `relax` itself."""


def _add(app: typer.Typer, name: str, command: Any) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name, cls=PlainCommand)(command)


def _add_installed(app: typer.Typer, name: str) -> None:
    """Add the command of another distribution, or a command that reports why it cannot load."""
    try:
        command = COMMANDS.load(name, "command")
    except ConfigError as error:
        _add_failing(app, name, str(error))
        return
    if isinstance(command, typer.Typer) or callable(command):
        _add(app, name, command)
    else:
        reason = f"command = {name!r}: {command!r:.200} is neither a function nor a typer.Typer; fix its entry point"
        _add_failing(app, name, reason)


def _add_failing(app: typer.Typer, name: str, reason: str) -> None:
    def fail() -> NoReturn:
        raise ConfigError(reason)

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name, help="(cannot be loaded)", context_settings=anything)(fail)


def _hide_secrets() -> None:
    """Show passwords in this process's arguments, which all users can list, as `***`."""
    if not any("://" in argument or "=" in argument for argument in sys.argv):
        return
    from relax_actors.config.masking import masked_argument

    shown = [masked_argument(argument) for argument in sys.argv]
    if shown != sys.argv:
        setproctitle.setproctitle(" ".join([sys.executable, *shown]))


def run() -> None:
    """Run a command, and report an error as one message.

    Exit code 2 for wrong input: arguments, options, configuration and names; 1 for any other error of relax.
    """
    gc.set_threshold(ALLOCATIONS)
    atexit.register(gc.freeze)  # the process ends: to look at all objects once more would take 0.1 s
    skip_optional_imports()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    _hide_secrets()
    try:
        build(sys.argv[1:])()
    except (ConfigError, AddressError, SubjectError) as error:
        _fail(f"{error}", 2)
    except BrokerError as error:
        _fail(f"{error}", 1)
    except RelaxError as error:
        _fail(f"{type(error).__name__}: {error}", 1)
    except BrokenPipeError:
        sys.exit(0)


def _fail(message: str, code: int) -> NoReturn:
    """Print an error, which may quote text of other processes, and exit."""
    sys.stderr.write(printable_lines(f"relax: {message}") + "\n")
    sys.exit(code)


if __name__ == "__main__":
    run()
