"""Transport `"torch"`: actors receive weights from the trainer's memory, over torch.distributed (gloo)."""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Iterator
from typing import ClassVar

from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.runtime import Context
from relax_actors.weights.protocols import WeightProducer
from relax_actors.weights.transports.base import Receiver, Sender, WeightTransport
from relax_actors.weights.transports.store import StoreReceiver


class TorchTransport(WeightTransport):
    """Sends tensors from the trainer's memory; see `WeightTransport`.

    Args:
        context: of the actor.
    """

    from_memory: ClassVar = True

    def __init__(self, context: Context) -> None:
        self._context = context

    @staticmethod
    def check(config: Config, here: Collection[str]) -> Iterator[str]:
        """Check that the trainer's machine can listen on `weights.listen`."""
        if "trainer" in here:
            _check_listen(config.weights.listen)
        yield from ()

    def make_sender(self, engine: WeightProducer) -> Sender:
        """Return a sender that listens on `weights.listen`."""
        from relax_actors.weights.transports.torch_transport.ends import MemorySender  # noqa: PLC0415 imports torch

        return MemorySender(self._context, engine)

    def make_receiver(self, *, follows: bool) -> Receiver:
        """Return a receiver for the newest version; older versions are read from files."""
        from relax_actors.weights.transports.torch_transport.ends import MemoryReceiver  # noqa: PLC0415 imports torch

        files = StoreReceiver(self._context.table)
        return MemoryReceiver(self._context, files) if follows else files


def _check_listen(address: str) -> None:
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        what = "is no address of this machine" if error.errno == errno.EADDRNOTAVAIL else f"{error.strerror}"
        msg = f"weights.listen = {address!r} {what}; set an address of the trainer's machine"
        raise ConfigError(msg) from error
