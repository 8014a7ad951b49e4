"""`relax check`: find what would fail later, without starting anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_actors.cli.options import ConfigPath, Overrides
from relax_actors.errors import ConfigError
from relax_actors.printable import printable_lines

if TYPE_CHECKING:
    from relax_actors.config import Config
    from relax_actors.data.model_folder import ModelFacts
    from relax_actors.data.tokenizer import Tokenizer
    from relax_actors.messages import Prompt

Check = Callable[[], Iterator[str]]
"""Checks one concern: yields notes, raises ConfigError for what cannot work."""


def check(
    config: ConfigPath,
    settings: Overrides = None,
    roles: Annotated[
        str | None, typer.Option(help="Check this machine for these roles only, as `relax up --roles` starts them.")
    ] = None,
    calls: Annotated[
        bool, typer.Option(help="Call rewards and the environment once, with the first row of the data.")
    ] = True,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Also print the resolved configuration as JSON, without passwords.")
    ] = False,
) -> None:
    """Check a configuration without starting anything.

    Findings go to stderr, the resolved configuration to stdout. Exit code 0 if the configuration can be run, 2 if not.
    """
    from relax_actors.cli.algorithms import algorithm_lines
    from relax_actors.config import load_config
    from relax_actors.config.load import set_by

    loaded = load_config(config, settings or [])
    spelled = set_by(config, settings or [])
    chosen = None if roles is None else [role for role in roles.split(",") if role]
    findings = examine(loaded, chosen, spelled, calls=config.resolve().parent if calls else None)
    for error in findings.errors:
        typer.echo(printable_lines(f"error: {error}"), err=True)
    for note in findings.notes:
        typer.echo(printable_lines(f"note: {note}"), err=True)
    for line in algorithm_lines(loaded, spelled):
        typer.echo(printable_lines(line), err=True)
    if findings.errors:
        count = len(findings.errors)
        them = "1 error; fix it" if count == 1 else f"{count} errors; fix them"
        typer.echo(f"failed: {them} before `relax up`", err=True)
    else:
        typer.echo("ok: this configuration can be run", err=True)
    if resolved:
        typer.echo(json.dumps(resolved_settings(loaded), indent=1))
    raise typer.Exit(2 if findings.errors else 0)


@dataclass(frozen=True, slots=True)
class Findings:
    """Result of a check.

    Attributes:
        errors: what cannot work; a run does not start with any.
        notes: what is worth knowing.
        facts: size and shape of the model; None if it cannot be read.
    """

    errors: tuple[str, ...]
    notes: tuple[str, ...]
    facts: ModelFacts | None = None


def examine(
    config: Config,
    roles: Collection[str] | None = None,
    spelled: Collection[str] = (),
    *,
    calls: Path | None = None,
) -> Findings:
    """Run all checks of a configuration; write to temporary files only.

    Args:
        config: configuration of the run.
        roles: roles whose actors start on this machine; all if None.
        spelled: dotted names that the file or an override sets; see `relax_actors.config.load.set_by`.
        calls: folder from which dotted paths are imported, to call rewards and the environment; None for no calls.
    """
    import tempfile

    from relax_actors.algorithms.refusals import refusals
    from relax_actors.cli import checks, machine, placement
    from relax_actors.cli.check_agents import check_agent, check_gateway
    from relax_actors.cli.check_backends import check_ranks, unused_settings
    from relax_actors.cli.check_environment import check_environment

    errors: list[str] = []
    notes: list[str] = []
    facts: ModelFacts | None = None
    tokenizer: Tokenizer | None = None

    def attempt(part: Check) -> None:
        try:
            notes.extend(part())
        except ConfigError as error:
            errors.append(str(error))

    with tempfile.TemporaryDirectory() as scratch:
        folder = config.model.path or Path(scratch)
        try:
            facts, tokenizer = checks.check_model(config, folder)
        except ConfigError as error:
            errors.append(str(error))
        here = machine.roles_here(config, roles)
        attempt(checks.check_installed)
        attempt(lambda: checks.check_roles(config))
        attempt(lambda: checks.check_rewards(config))
        attempt(lambda: check_environment(config))
        attempt(lambda: check_agent(config, here))
        attempt(lambda: check_gateway(config, here))
        errors.extend(refusals(config, spelled))
        errors.extend(unused_settings(config, spelled))
        attempt(lambda: check_ranks(config, here))
        attempt(lambda: checks.check_isolation(config, here))
        attempt(lambda: checks.check_steps(config))
        attempt(lambda: placement.check_devices(config))
        attempt(lambda: machine.check_devices(config, here))
        attempt(lambda: machine.check_folders(config))
        attempt(lambda: machine.check_addresses(config, here))
        rows: dict[str, Prompt] = {}
        for part in (
            _checks_without_model(config)
            if facts is None or tokenizer is None
            else _checks_of_model(config, folder, facts, tokenizer, here, rows)
        ):
            attempt(part)
        for part in _calls(config, here, calls, rows) if calls is not None and not errors else ():
            attempt(part)
    # Several checks may meet the same cause, such as a role that does not import.
    return Findings(tuple(dict.fromkeys(errors)), tuple(dict.fromkeys(notes)), facts)


def _checks_without_model(config: Config) -> list[Check]:
    """Return checks in place of those that need the model, where it cannot be read."""
    from relax_actors.cli.check_data import check_source

    sections = [config.data, *([config.eval.data] if config.eval is not None else [])]
    return [partial(check_source, section) for section in sections]


def _calls(config: Config, here: Collection[str], import_path: Path, rows: dict[str, Prompt]) -> list[Check]:
    """Return the checks that call rewards and the environment."""
    from relax_actors.cli.check_calls import calls_of, check_call
    from relax_actors.cli.trial_call import role_of

    found = [call for call in calls_of(config) if role_of(call.setting) in here]
    return [partial(check_call, config, call, import_path, rows) for call in found]


def _checks_of_model(
    config: Config,
    folder: Path,
    facts: ModelFacts,
    tokenizer: Tokenizer,
    here: Collection[str],
    rows: dict[str, Prompt],
) -> list[Check]:
    """Return the checks that need the size and shape of the model."""
    from relax_actors.cli import checks
    from relax_actors.cli.check_capacity import check_disk, check_memory
    from relax_actors.cli.check_characters import check_characters
    from relax_actors.cli.check_data import check_data
    from relax_actors.cli.check_teacher import check_teacher
    from relax_actors.cli.critic import check_critic
    from relax_actors.engines.backends import inference_backend, training_backend

    found: list[Check] = [
        lambda: checks.describe_run(config, facts, here),
        lambda: training_backend(config).check(config, folder),
        lambda: inference_backend(config).check(config, folder),
        lambda: checks.check_scoring(config, folder),
        lambda: check_teacher(config, folder),
        lambda: checks.check_router_replay(config, facts),
        lambda: checks.check_weight_files(config),
        lambda: check_critic(config, folder, facts),
        lambda: checks.check_lengths(config, facts),
        lambda: check_data(config, config.data, "data", folder, tokenizer, facts, rows),
        lambda: check_characters(config, tokenizer),
    ]
    if (held_out := config.eval) is not None:
        found.append(lambda: check_data(config, held_out.data, "eval.data", folder, tokenizer, facts, rows))
    return [*found, lambda: check_memory(config, facts, here), lambda: check_disk(config, facts)]


def require(config: Config, roles: Collection[str] | None = None, spelled: Collection[str] = ()) -> Findings:
    """Run all checks, and refuse a configuration that cannot work; arguments as `examine`.

    Raises:
        ConfigError: one line an error.
    """
    findings = examine(config, roles, spelled)
    if findings.errors:
        raise ConfigError("\n".join(findings.errors))
    return findings


def resolved_settings(config: Config) -> dict[str, Any]:
    """Return all settings of a run as plain data, defaults included, with secrets as ***."""
    from relax_actors.config.masking import masked

    settings: dict[str, Any] = masked(config.model_dump(mode="json", exclude_none=True))
    return settings
