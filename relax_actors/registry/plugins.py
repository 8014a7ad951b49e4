"""Extensions of other distributions, found by entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from relax_actors.errors import ConfigError


def entry_points_of(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, without importing what they name.

    Raises:
        ConfigError: two distributions use the same name.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        if (other := found.setdefault(entry.name, entry)).value != entry.value:
            msg = (
                f"entry point {entry.name!r} of group {group} is in {distribution_of(other)} and in "
                f"{distribution_of(entry)}; uninstall one of them"
            )
            raise ConfigError(msg)
    return found


def load_entry_point(entry: EntryPoint) -> Any:
    """Import the object that an entry point names.

    Raises:
        ConfigError: the import fails; names the distribution and the remedy.
    """
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        where = distribution_of(entry)
        msg = (
            f"entry point {entry.name!r} of group {entry.group} in {where} cannot be loaded: {entry.value} raised "
            f"{type(error).__name__}: {error}. Update or uninstall {where.partition(' ')[0]}"
        )
        raise ConfigError(msg) from error


def distribution_of(entry: EntryPoint) -> str:
    """Return name and version of the distribution that declares an entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
