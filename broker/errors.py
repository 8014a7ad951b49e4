"""The exception tree of the project; every error we raise on purpose is a `RelaxError`.

A message says what happened, to what, and what to do about it.
"""

from __future__ import annotations


class RelaxError(Exception):
    """Root of all errors that relax-actors raises on purpose."""


class BrokerError(RelaxError):
    """The broker could not be started, reached or used."""


class BrokerUnreachableError(BrokerError):
    """No answer from the broker before the deadline."""


class BrokerFullError(BrokerError):
    """The broker has no room for a message."""


class CodecError(RelaxError):
    """A message that does not decode: wrong schema, unknown field, wrong type, too large."""


class SubjectError(RelaxError):
    """A name that cannot be part of a subject, or a subject of none of our kinds."""


class StoreError(RelaxError):
    """A tensor segment that is missing, corrupt, outside the store or cannot be written."""


class StoreFullError(StoreError):
    """No space left for a segment."""
