"""Weights by broadcast: a gloo group of an actor and the ranks of its server, on the loopback interface.

The actor is rank 0 and hosts the store where the others find it. A group is for one life of a server; NCCL is not used,
for what is sent is the actor's verified copy in host memory.
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

dist: Any = torch.distributed  # its stubs leave out most of what is used here
HOST, BACKEND = "127.0.0.1", "gloo"
MEET_SECONDS = 60.0


class Broadcast:
    """The actor's end of a group.

    Args:
        server: whose ranks are the others.
        ranks: of the server.

    Raises:
        EngineError: the server does not come.
    """

    def __init__(self, server: Server, ranks: int) -> None:
        self.life, self._name = server.record.life, f"relax-{uuid.uuid4().hex}"
        self._listener = socket.create_server((HOST, 0))
        port = self._listener.getsockname()[1]
        seconds = timedelta(seconds=MEET_SECONDS)
        store = dist.TCPStore(
            HOST,
            port,
            is_master=True,
            timeout=seconds,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        # The names under which torch lets the members of such a group find each other.
        device = next(iter(dist.distributed_c10d.BackendConfig(dist.Backend(BACKEND)).get_device_backend_map()))
        for name in (self._name, f"{self._name}/", f"{device}/"):
            store = dist.PrefixStore(name, store)
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 torch has no public way to choose the address
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        options._timeout = seconds  # noqa: SLF001

        def meet() -> None:
            self._group: Any = dist.ProcessGroupGloo(store, 0, ranks + 1, options)

        self._beside(lambda: server.join_group(HOST, port, ranks + 1, self._name, BACKEND), meet)

    @staticmethod
    def _beside(ask: Callable[[], None], do: Callable[[], None]) -> None:
        """Do our part of what the server is asked for meanwhile."""
        with ThreadPoolExecutor(1) as beside:
            asked = beside.submit(ask)
            try:
                do()
            except RuntimeError as error:
                asked.result()  # the server's own words are the better ones
                msg = f"weights could not be broadcast: {error}"
                raise EngineError(msg) from error
            asked.result()

    def send(self, server: Server, tensors: Mapping[str, Tensor], identity: str) -> None:
        """Have the server take tensors.

        Raises:
            EngineError: it could not; ServerGoneError if it is gone.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=LOAD_SECONDS)

        def broadcast() -> None:
            for work in [self._group.broadcast([tensor], options) for tensor in tensors.values()]:
                work.wait(options.timeout)

        self._beside(lambda: server.load_broadcast(tensors, self._name, identity), broadcast)

    def close(self) -> None:
        """End it."""
        self._group = None
