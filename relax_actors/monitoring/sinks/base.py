"""Protocol of a sink."""

from __future__ import annotations

from typing import Protocol

from relax_actors.monitoring.log_message import LogMessage


class Sink(Protocol):
    """Destination of the events and metrics of one run, besides the terminal.

    A sink is made as `Sink(target, run)`: `target` is the text after `NAME=` of `--sink`, `run` the name of the run.
    For an unusable target or a missing package the constructor raises `ConfigError` with the remedy, or `OSError`.

    All methods are called from one thread. A method that blocks delays the terminal view, and messages are discarded
    meanwhile.
    """

    def take(self, message: LogMessage) -> None:
        """Receive one message, in the order of arrival; raise for no content.

        Ignore messages of no interest. Role, number and kind are true; every role may publish what it likes about
        itself, so the fields of the body may be of any type, size and number.
        """

    def close(self) -> None:
        """Write what is buffered and free all resources; called once, as the last call."""


class KnownNames:
    """The first names of a series of names, so that their number is bounded."""

    def __init__(self, limit: int = 1000) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def keep(self, values: dict[str, float]) -> dict[str, float]:
        """Return the values whose names are known, or new while there is room."""
        for name in values:
            if len(self._known) < self._limit:
                self._known.add(name)
        return {name: value for name, value in values.items() if name in self._known}
