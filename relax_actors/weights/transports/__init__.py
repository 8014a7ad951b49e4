"""Transports of published weights from the trainer to other actors.

The weight files in the store are written with every transport. They are the durable copy, and each receiver falls back
to them. All transports end in the same verified host copy.
"""

from __future__ import annotations

from relax_actors.registry.catalog import WEIGHT_TRANSPORTS
from relax_actors.runtime import Context
from relax_actors.weights.transports.base import Receiver, Sender, WeightTransport


def make_transport(context: Context) -> WeightTransport:
    """Return the transport that the run configures.

    Raises:
        ConfigError: the transport cannot be imported.
    """
    transport: WeightTransport = WEIGHT_TRANSPORTS.load(context.config.weights.transport, "weights.transport")(context)
    return transport


__all__ = ["Receiver", "Sender", "WeightTransport", "make_transport"]
