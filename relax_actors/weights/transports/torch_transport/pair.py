"""Connection of two processes: a gloo process group with exactly two members.

There is no global process group. A pair is made when a receiver connects, and is unusable after its first failure.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed  # its stubs lack most of the functions used here
Store = Any

SENDER, RECEIVER = 0, 1
IDLE_SECONDS = 365 * 86400.0
"""How long a sender waits for the next request; a closed connection ends the wait at once."""
_MIN_SECONDS = 0.001


def open_store(host: str, port: int, seconds: float, listener: int | None = None) -> Store:
    """Connect to a TCPStore; with the file descriptor of a listening socket, host the store too."""
    return dist.TCPStore(
        host,
        port,
        is_master=listener is not None,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


class Pair:
    """One end of the connection. All failures raise RuntimeError.

    Args:
        store: where the two ends find each other; not used by another thread.
        name: agreed upon by both ends.
        rank: SENDER or RECEIVER.
        host: address of this machine that the other end can reach.
        seconds: timeout for the other end to connect, and of each call without a deadline.
    """

    def __init__(self, store: Store, name: str, rank: int, host: str, seconds: float) -> None:
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 torch has no public way to choose the address
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        options._timeout = timedelta(seconds=seconds)  # noqa: SLF001
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2, options)
        self._other, self._seconds = 1 - rank, seconds

    def send(self, data: Tensor | bytes) -> None:
        """Send bytes, or a contiguous CPU tensor."""
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if isinstance(data, bytes) else data
        self._open_group().send([tensor], self._other, 0).wait(timedelta(seconds=self._seconds))

    def receive_into(self, tensor: Tensor, deadline: float | None = None) -> None:
        """Fill a contiguous CPU tensor; the other end must send as many bytes.

        Args:
            tensor: to fill.
            deadline: in seconds of `time.monotonic`; without it the timeout of the pair counts.
        """
        seconds = self._seconds if deadline is None else max(_MIN_SECONDS, deadline - time.monotonic())
        self._open_group().recv([tensor], self._other, 0).wait(timedelta(seconds=seconds))

    def receive(self, count: int, deadline: float | None = None) -> bytes:
        """Receive `count` bytes; see `receive_into`."""
        data = torch.empty(count, dtype=torch.uint8)
        self.receive_into(data, deadline)
        return data.numpy().tobytes()

    def close(self) -> None:
        """Close the connection, from any thread; a waiting call of the other end fails.

        The connection ends with the last reference to the group: a thread that waits in a call here keeps it open until
        the other end closes.
        """
        self._group = None

    def _open_group(self) -> Any:
        group = self._group
        if group is None:
            msg = "this end of the connection was closed"
            raise RuntimeError(msg)
        return group
