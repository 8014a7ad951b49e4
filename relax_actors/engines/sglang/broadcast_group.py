"""Broadcast of weights in a gloo group of an actor and the ranks of its server.

The actor is rank 0 and hosts the store where the ranks meet. A group serves one instance of a server. NCCL is not used:
the tensors are the actor's verified copy in host memory.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed
from torch import Tensor

from relax_actors.engines.sglang.server import LOAD_SECONDS, Server
from relax_actors.errors import EngineError

dist: Any = torch.distributed  # its stubs lack most of the functions used here
HOST, BACKEND = "127.0.0.1", "gloo"
CONNECT_SECONDS = 60.0


class BroadcastGroup:
    """The actor's end of a group; raises EngineError if the server does not join."""

    def __init__(self, server: Server, ranks: int) -> None:
        self.instance, self._name = server.record.instance, f"relax-{uuid.uuid4().hex}"
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=CONNECT_SECONDS)
        store = dist.TCPStore(
            HOST,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        # The prefixes with which torch's init_process_group, called by SGLang, looks the members up.
        device = next(iter(dist.distributed_c10d.BackendConfig(dist.Backend(BACKEND)).get_device_backend_map()))
        for name in (self._name, f"{self._name}/", f"{device}/"):
            store = dist.PrefixStore(name, store)
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 torch has no public way to choose the address
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        options._timeout = timeout  # noqa: SLF001

        def join() -> None:
            self._group: Any = dist.ProcessGroupGloo(store, 0, ranks + 1, options)

        self._run_both(lambda: server.join_group(HOST, port, ranks + 1, self._name, BACKEND), join)

    @staticmethod
    def _run_both(request: Callable[[], None], own_part: Callable[[], None]) -> None:
        """Run the actor's part of an operation while the request for the server's part is answered."""
        with ThreadPoolExecutor(1) as thread:
            requested = thread.submit(request)
            try:
                own_part()
            except RuntimeError as error:
                requested.result()  # raises the server's own error, which says more
                msg = f"weights could not be broadcast to the server: {error}"
                raise EngineError(msg) from error
            requested.result()

    def send(self, server: Server, tensors: Mapping[str, Tensor], identity: str) -> None:
        """Broadcast tensors, which the server loads as `identity`; raises EngineError or ServerGoneError."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=LOAD_SECONDS)

        def broadcast() -> None:
            for work in [self._group.broadcast([tensor], options) for tensor in tensors.values()]:
                work.wait(options.timeout)

        self._run_both(lambda: server.load_broadcast(tensors, self._name, identity), broadcast)

    def close(self) -> None:
        """Leave the group."""
        self._group = None
