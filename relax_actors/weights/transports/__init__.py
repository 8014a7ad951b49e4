"""Transports of published weights from the trainer to other actors.

The weight files in the store are written with every transport, as the durable copy. All transports end in the same
verified host copy.
"""

from __future__ import annotations

from typing import Any

from relax_actors.config import Config
from relax_actors.registry.catalog import WEIGHT_TRANSPORTS
from relax_actors.runtime import Context
from relax_actors.weights.transports.base import Receiver, Sender, WeightTransport


def transport_class(config: Config) -> Any:
    """Return the class of a run's transport; raises ConfigError if unusable."""
    return WEIGHT_TRANSPORTS.load(config.weights.transport, "weights.transport")


def make_transport(context: Context) -> WeightTransport:
    """Return the transport of an actor; errors as `transport_class`."""
    transport: WeightTransport = transport_class(context.config)(context)
    return transport


__all__ = ["Receiver", "Sender", "WeightTransport", "make_transport", "transport_class"]
