"""Exceptions of the project: every error raised on purpose is a `RelaxError`.

A message says what happened, to what, and what to do about it.
"""

from __future__ import annotations


class RelaxError(Exception):
    """Root of all errors that relax-actors raises on purpose."""


class ConfigError(RelaxError):
    """Invalid configuration, found before anything starts; the process is not restarted.

    Args:
        problems: texts of one or several problems, each a line of the error unless it quotes longer texts.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class BrokerError(RelaxError):
    """The broker could not be started, reached or used."""


class BrokerUnreachableError(BrokerError):
    """The broker did not answer before the deadline."""


class BrokerFullError(BrokerError):
    """The broker has no room for a message."""


class AddressError(BrokerError):
    """An address or a file of credentials that the user named cannot be used."""


class CodecError(RelaxError):
    """A message cannot be decoded: wrong schema, unknown field, wrong type or too large."""


class SubjectError(RelaxError):
    """A name cannot be part of a subject, or a subject does not name a cell of the run."""


class StoreError(RelaxError):
    """A tensor segment is missing, corrupt, outside the store or cannot be written."""


class UnsafePathError(RelaxError):
    """Another user could read, replace or hold a folder or a lock of this one."""


class StoreFullError(StoreError):
    """No space is left for a segment."""
