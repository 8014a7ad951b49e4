"""The process of one rank: an engine that does what it is told, until the socket that it is told through closes.

Started by `group` as `python -m relax_actors.engines.megatron.mcore.rank <descriptor of a socket> <folder> <rank>`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from relax_actors.config.load import validate
from relax_actors.engines.megatron.calls import batch_of, plain_error
from relax_actors.engines.megatron.mcore.engine import MegatronEngine
from relax_actors.engines.megatron.wire import Channel
from relax_actors.engines.protocols.sequences import Sequences

MEETING = timedelta(seconds=120)
"""How long a rank waits for the others to come."""


class _Delta:
    """The two halves of `delta`, which are two messages: whether there is one, and where to write it."""

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine
        self._write: Callable[[Path], str] | None = None

    def find(self) -> bool:
        self._write = self._engine.delta()
        return self._write is not None

    def write(self, path: str) -> str:
        return self._write(Path(path)) if self._write is not None else ""


class _Saving:
    """The two halves of `begin_save`, which are two messages."""

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine
        self._finish: Callable[[], None] = lambda: None

    def begin(self, folder: str) -> None:
        self._finish = self._engine.begin_save(Path(folder))

    def finish(self) -> None:
        # It holds the copy.
        finish, self._finish = self._finish, lambda: None
        finish()


def _calls(engine: MegatronEngine, progress: Callable[[], None]) -> dict[str, Callable[..., Any]]:
    """What a rank can be told, by name: each takes what a message holds and gives what one can."""
    delta, saving = _Delta(engine), _Saving(engine)
    return {
        "initialise": engine.initialise,
        "warm_start": lambda sequences, rate: dict(engine.warm_start(Sequences(**sequences), rate, progress).metrics),
        "finish_warm_start": engine.finish_warm_start,
        "step": lambda batch, step: dict(engine.step_on(batch_of(batch), step, progress).metrics),
        "publish": lambda path: engine.publish(Path(path)),
        "remember": engine.remember,
        "delta": delta.find,
        "write_delta": delta.write,
        "fingerprint": engine.fingerprint,
        "save": lambda folder: engine.save(Path(folder)),
        "begin_save": saving.begin,
        "finish_save": saving.finish,
        "load": lambda folder: engine.load(Path(folder)),
        "export": lambda folder: engine.export(Path(folder)),
    }


def _store(channel: Channel, rank: int, ranks: int, port: int | None) -> Store:
    """Where the ranks meet: rank 0 opens a port of this machine and tells it."""
    if rank != 0:
        return TCPStore("127.0.0.1", port or 0, ranks, is_master=False, timeout=MEETING)
    store = TCPStore("127.0.0.1", 0, ranks, is_master=True, timeout=MEETING, wait_for_workers=False)
    channel.send({"port": store.port})
    return store


def main() -> None:
    """Entry point of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        start = channel.receive()
        config = validate(start["config"], "trainer")
        torch.set_num_threads(config.run.threads)
        store = _store(channel, start["rank"], config.trainer.megatron.ranks, start["port"])
        engine = MegatronEngine(config, start["rank"], store)
        calls = _calls(engine, lambda: channel.send({"progress": True}))
        channel.send({"done": None})
        while True:
            message = channel.receive()
            try:
                done = calls[message["call"]](*message["arguments"])
            except EOFError:
                raise
            except Exception as error:  # noqa: BLE001 told to the engine, which decides
                channel.send({"error": plain_error(error)})
            else:
                channel.send({"done": done})
    except EOFError:
        pass  # the engine is gone
    except BaseException as error:  # noqa: BLE001 the process ends here
        channel.send({"error": plain_error(error)})
    sys.stderr.flush()
    # Collectives leave threads behind, and their other ranks may be gone.
    os._exit(0)


if __name__ == "__main__":
    main()
