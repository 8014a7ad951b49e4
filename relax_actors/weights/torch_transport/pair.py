"""One connection of two processes over torch.distributed (gloo): a process group of two that nobody else is in.

There is no global process group: a pair is made when a receiver comes, and is of no more use after its first failure.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed  # its stubs leave out most of what is used here
Store = Any

SENDER, RECEIVER = 0, 1
IDLE_SECONDS = 365 * 86400.0
"""How long a sender waits for the next request: it is woken when the other end goes."""
_LEAST_SECONDS = 0.001


def open_store(host: str, port: int, seconds: float, listener: int | None = None) -> Store:
    """A connection to a TCPStore; with a listening socket, the store itself too."""
    return dist.TCPStore(
        host,
        port,
        is_master=listener is not None,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


class Pair:
    """One end. Everything that fails raises RuntimeError.

    Args:
        store: where the two find each other; not used by another thread.
        name: what the two have agreed upon.
        rank: SENDER or RECEIVER.
        host: address of this machine that the other end reaches.
        seconds: how long to wait for the other end, now and where no deadline is given.
    """

    def __init__(self, store: Store, name: str, rank: int, host: str, seconds: float) -> None:
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 torch has no public way to choose the address
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        options._timeout = timedelta(seconds=seconds)  # noqa: SLF001
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2, options)
        self._other, self._seconds = 1 - rank, seconds

    def send(self, data: Tensor | bytes) -> None:
        """Send bytes, or a contiguous tensor on the CPU."""
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if isinstance(data, bytes) else data
        self._alive().send([tensor], self._other, 0).wait(timedelta(seconds=self._seconds))

    def receive_into(self, tensor: Tensor, end: float | None = None) -> None:
        """Fill a contiguous tensor on the CPU, until `end` of the monotonic clock; the other end sends as much."""
        seconds = self._seconds if end is None else max(_LEAST_SECONDS, end - time.monotonic())
        self._alive().recv([tensor], self._other, 0).wait(timedelta(seconds=seconds))

    def receive(self, count: int, end: float | None = None) -> bytes:
        """Give `count` bytes."""
        data = torch.empty(count, dtype=torch.uint8)
        self.receive_into(data, end)
        return data.numpy().tobytes()

    def close(self) -> None:
        """End the connection; the other end fails where it waits. From any thread.

        It is the last reference that ends it: a thread that waits here keeps it until the other end goes.
        """
        self._group = None

    def _alive(self) -> Any:
        group = self._group
        if group is None:
            msg = "this end of the connection was closed"
            raise RuntimeError(msg)
        return group
