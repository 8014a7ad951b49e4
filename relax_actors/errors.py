"""Errors of the engine; all of them are `broker.errors.RelaxError`."""

from __future__ import annotations

from broker.errors import (
    BrokerError,
    BrokerFullError,
    BrokerUnreachableError,
    CodecError,
    RelaxError,
    StoreError,
    StoreFullError,
    SubjectError,
)

__all__ = [
    "ActorError",
    "BrokerError",
    "BrokerFullError",
    "BrokerUnreachableError",
    "CodecError",
    "ConfigError",
    "EngineError",
    "FencedError",
    "RelaxError",
    "RowError",
    "StoreError",
    "StoreFullError",
    "SubjectError",
]


class ConfigError(RelaxError):
    """The configuration cannot work; found before anything starts, never restarted."""


class RowError(RelaxError):
    """This row's data is bad and will be so next time: it is quarantined at once, the actor lives on."""


class ActorError(RelaxError):
    """The actor cannot work, whatever the row: its process ends, and no row is blamed."""


class EngineError(RelaxError):
    """An engine failed again and again with these rows in hand: it is counted against them."""


class FencedError(ActorError):
    """Another life of this actor took over; this one must stop."""
