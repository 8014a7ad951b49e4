"""Transports that bring published weights from the trainer to the actors that compute with them.

The weight files in the store are written with every transport. They are the durable copy, and each receiver falls back
to them. All transports end in the same verified host copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from relax_actors.registry.dotted import load
from relax_actors.runtime.role import Context
from relax_actors.weights.transports.base import Receiver, Sender, WeightTransport

TRANSPORTS = {
    "store": "relax_actors.weights.transports.store:StoreTransport",
    "torch": "relax_actors.weights.transports.torch:TorchTransport",
}
"""Transports by the name in `weights.transport`; imported on use."""


def make_transport(context: Context) -> WeightTransport:
    """Return the transport that the run configures.

    Raises:
        ConfigError: the transport cannot be imported.
    """
    path = TRANSPORTS[context.config.weights.transport]
    return cast("Callable[[Context], WeightTransport]", load(path, "weights.transport"))(context)


__all__ = ["TRANSPORTS", "Receiver", "Sender", "WeightTransport", "make_transport"]
