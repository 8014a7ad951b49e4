"""Check that a role may join or leave a live run without effect on other roles."""

from __future__ import annotations

from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.roles.columns import check_columns
from relax_actors.roles.permissions import permissions
from relax_actors.roles.registry import make_role, role_names, spec_of
from relax_actors.runtime import Role, StatefulRole


def check_addition(before: Config, after: Config, role: str) -> None:
    """Check that a role can be added while the run is up.

    Raises:
        ConfigError: its columns do not fit, or another role would wait for its column in rows that are in flight.
    """
    list(check_columns(after))
    if spec_of(after, role).single and after.roles[role].replicas != 1:
        msg = f"roles.{role} owns state and has one actor; set roles.{role}.replicas = 1"
        raise ConfigError(msg)
    for other in role_names(before):
        if columns := sorted(_reads(after, other) - _reads(before, other)):
            msg = (
                f"roles.{role} cannot be added while the run is up: {other} would then wait for {', '.join(columns)} "
                "of rows that are in flight, and of steps that are replayed; put the section in the TOML file before "
                "the run starts"
            )
            raise ConfigError(msg)
    _check_others(before, after, role, "added")


def check_removal(before: Config, after: Config, role: str) -> None:
    """Check that a role can be removed; raises ConfigError if another one needs it."""
    for other in role_names(after):
        if columns := sorted(_reads(before, other) & set(spec_of(before, role).writes) - {"dropped", "quarantined"}):
            msg = f"roles.{role} cannot be removed: {other} reads column {', '.join(columns)}, which it writes"
            raise ConfigError(msg)
    list(check_columns(after))
    _check_others(after, before, role, "removed")


def _check_others(without: Config, with_role: Config, role: str, change: str) -> None:
    for other in role_names(without):
        if permissions(without, other) != permissions(with_role, other):
            msg = (
                f"roles.{role} cannot be {change} while the run is up: {other} sends it requests, and its credentials "
                "would change; stop the run, change the TOML file, and start the run again"
            )
            raise ConfigError(msg)


def _reads(config: Config, role: str) -> set[str]:
    """Return the columns of rows, and kinds of cells, that a role waits for."""
    instance: Role = make_role(config, role)
    columns = set(instance.inputs(config))
    if isinstance(instance, StatefulRole):
        columns |= {subject.rpartition(".")[2] for subject in instance.follows(config)} - {"*"}
    return columns
