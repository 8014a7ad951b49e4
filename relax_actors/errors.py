"""Errors of the engine; all are subclasses of `broker.errors.RelaxError`."""

from __future__ import annotations

from broker.errors import (
    AddressError,
    BrokerError,
    BrokerFullError,
    BrokerUnreachableError,
    CodecError,
    ConfigError,
    RelaxError,
    StoreError,
    StoreFullError,
    SubjectError,
    UnsafePathError,
)

__all__ = [
    "ActorError",
    "AddressError",
    "AllRowsFailedError",
    "BrokerError",
    "BrokerFullError",
    "BrokerUnreachableError",
    "CodecError",
    "ConfigError",
    "EngineError",
    "FencedError",
    "MissingPackageError",
    "RecordError",
    "RelaxError",
    "RowError",
    "RowTakenError",
    "SlowRowError",
    "StoreError",
    "StoreFullError",
    "SubjectError",
    "UnsafePathError",
]


class MissingPackageError(ConfigError):
    """A required Python package is not installed on this machine."""


class RowError(RelaxError):
    """Permanently bad data in a row: the row is quarantined at once, and the actor continues."""


class RowTakenError(RelaxError):
    """Another actor has the row, because this one was presumed dead: this one releases the row."""


class TooLongError(RowError):
    """Text that has more tokens than the model's context, refused before it is tokenized."""


class SlowRowError(RowError):
    """Row whose prompt took too long to make."""


class ActorError(RelaxError):
    """Failure of the actor, whatever the row: the process ends, and no row is blamed."""


class AllRowsFailedError(RelaxError):
    """The first rows of a role all failed with one error, so the run stops."""


class EngineError(RelaxError):
    """Repeated failure of an engine with the current rows: counted against these rows."""


class EpisodesFailedError(RelaxError):
    """Failure of the environment in all samples of a row: counted against the row."""


class FencedError(ActorError):
    """Fencing: a later incarnation of the actor has started, so this one must exit."""


class RecordError(RelaxError):
    """The record of kept rows is damaged, in use by another process, or cannot be written."""


class DownloadError(Exception):
    """Failure of a download that may pass: no answer, a time-out, or a server's error."""
