"""Process of one rank: executes the calls that arrive on a socket until the socket closes.

Started by `rank_group`, or on another node by `rank_host`, as
`python -m relax_actors.engines.ranks.rank <socket descriptor> <folder> <role> <rank>`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from broker.files import make_private_folder
from broker.routes import local_address
from relax_actors.config import Config
from relax_actors.config.load import validate
from relax_actors.devices.binding import own_device
from relax_actors.engines.backends import critic_backend, critic_section, training_backend
from relax_actors.engines.protocols.critic import RankCritic
from relax_actors.engines.protocols.training import RankEngine, StepResult
from relax_actors.engines.ranks.collectives import use_gpu, use_network
from relax_actors.engines.ranks.group import profile_of_rank
from relax_actors.engines.ranks.rpc import pack_error, unpack_samples
from relax_actors.engines.ranks.wire import Channel
from relax_actors.runtime.run_folder import RunFolder

RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
"""How long a rank waits for the other ranks to start."""


class _DeltaCalls:
    """`delta` as two calls: whether there is a delta, and the paths to write it to."""

    def __init__(self, engine: RankEngine) -> None:
        self._engine = engine
        self._write: Callable[..., str] | None = None

    def find(self) -> bool:
        self._write = self._engine.delta()
        return self._write is not None

    def write(self, *paths: Path) -> str:
        return self._write(*paths) if self._write is not None else ""


class _SaveCalls:
    """`begin_save` as two calls: begin, and finish."""

    def __init__(self, engine: RankEngine | RankCritic) -> None:
        self._engine = engine
        self._finish: Callable[[], None] = lambda: None

    def begin(self, folder: Path) -> None:
        self._finish = self._engine.begin_save(folder)

    def finish(self) -> None:
        # Drop the reference: the function holds the copied state.
        finish, self._finish = self._finish, lambda: None
        finish()


Methods = dict[str, Callable[..., Any]]
"""Methods by the name in a call; arguments and results are plain data."""
ToPath = Callable[[str], Path]
"""Returns a path of the trainer's node as seen on this node."""


def _trainer_methods(engine: RankEngine, progress: Callable[[], None], path_of: ToPath, rank: int) -> Methods:
    delta = _DeltaCalls(engine)

    def write_profile(path: str) -> None:
        target = profile_of_rank(path_of(path), rank)
        make_private_folder(target.parent)
        engine.end_profile(target)

    return _shared_methods(engine, progress, path_of) | {
        "initialise": engine.initialise,
        "warm_start": lambda samples, rate: dict(engine.warm_start(unpack_samples(samples), rate, progress).metrics),
        "finish_warm_start": engine.finish_warm_start,
        "score": lambda samples: engine.score(unpack_samples(samples), progress),
        "publish": lambda *paths: engine.publish(*map(path_of, paths)),
        "prefixes": engine.prefixes,
        "measure_gradients": engine.measure_gradients,
        "remember": engine.remember,
        "delta": delta.find,
        "write_delta": lambda *paths: delta.write(*map(path_of, paths)),
        "begin_profile": partial(_problem_of, engine.begin_profile),
        "cancel_profile": engine.cancel_profile,
        "end_profile": partial(_problem_of, write_profile),
    }


def _problem_of(method: Callable[..., None], *arguments: Any) -> str:
    """Call a method; return its error, empty if there is none.

    Raised errors end the group if other ranks still compute after `GRACE_SECONDS`, and a profile may take longer.
    """
    try:
        method(*arguments)
    except Exception as error:  # noqa: BLE001 raised by the group when all ranks have answered
        return f"{type(error).__name__}: {error}"
    return ""


def _critic_methods(engine: RankCritic, progress: Callable[[], None], path_of: ToPath) -> Methods:
    return _shared_methods(engine, progress, path_of) | {
        "initialise": lambda policy: engine.initialise(None if policy is None else [path_of(path) for path in policy]),
        "values": lambda samples: engine.values(unpack_samples(samples), progress),
    }


def _plain(result: StepResult) -> dict[str, Any]:
    return {"metrics": dict(result.metrics), "micro_batches": [dict(one) for one in result.micro_batches]}


def _shared_methods(engine: RankEngine | RankCritic, progress: Callable[[], None], path_of: ToPath) -> Methods:
    saving = _SaveCalls(engine)
    return {
        "accumulate": lambda samples: engine.accumulate(unpack_samples(samples), progress),
        "discard": engine.discard,
        "step": lambda step: _plain(engine.step(step, progress)),
        "fingerprint": engine.fingerprint,
        "save": lambda folder: engine.save(path_of(folder)),
        "begin_save": lambda folder: saving.begin(path_of(folder)),
        "finish_save": saving.finish,
        "load": lambda folder: engine.load(path_of(folder)),
        "export": lambda folder: engine.export(path_of(folder)),
        "release_memory": lambda folder: engine.release_memory(None if folder is None else path_of(folder)),
        "resume_memory": engine.resume_memory,
    }


def _store(channel: Channel, start: dict[str, Any], ranks: int) -> Store:
    """Rendezvous of the ranks: rank 0 opens a port and reports its number."""
    host, rank = start["host"], start["rank"]
    if rank != 0:
        return TCPStore(host, start["port"], ranks, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
    # Without an existing socket, a TCPStore listens on all interfaces.
    listener = socket.create_server((host, 0), backlog=ranks)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        ranks,
        is_master=True,
        timeout=RENDEZVOUS_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    channel.send({"port": port})
    return store


def _path_of(roots: list[str], own: list[Path]) -> ToPath:
    """Translate paths below the trainer's store and folder; the store may be in the folder."""

    def here(text: str) -> Path:
        path = Path(text)
        for theirs, ours in zip(roots, own, strict=False):
            if path.is_relative_to(theirs):
                return ours / path.relative_to(theirs)
        return path

    return here


def _begin(config: Config, start: dict[str, Any], channel: Channel) -> Methods:
    """Join the other ranks and build the engine of the role; returns its methods."""
    import relax_actors.engines.lean_imports  # noqa: F401, PLC0415 before an engine imports transformers

    rank, is_critic = start["rank"], start["role"] == "critic"
    section = critic_section(config) if is_critic else config.trainer
    use_network(local_address(start["host"]))
    if torch.cuda.is_available() and own_device(section.device) != "cpu":
        use_gpu(start["device"])
    path_of = _path_of(start.get("roots", []), [config.store_path.absolute(), config.folder.absolute()])

    def progress() -> None:
        channel.send({"progress": True})

    if is_critic:
        critic = critic_backend(critic_section(config))
        store = _store(channel, start, critic.ranks(config).count)
        return _critic_methods(critic.build_rank(config, rank, store), progress, path_of)
    trainer = training_backend(config)
    store = _store(channel, start, trainer.ranks(config).count)
    return _trainer_methods(trainer.build_rank(config, rank, store), progress, path_of, rank)


def _config(start: dict[str, Any]) -> Config:
    """Return the configuration that the actor sent, or on another node that of the node's folder."""
    if "config" in start:
        return validate(start["config"], start["role"])
    return RunFolder(Path(sys.argv[2])).load_config()


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        start = channel.receive()
        config = _config(start)
        methods = _begin(config, start, channel)
        channel.send({"result": None})
        while True:
            message = channel.receive()
            try:
                result = methods[message["call"]](*message["arguments"])
            except EOFError:
                raise
            except Exception as error:  # noqa: BLE001 sent to the engine, which raises it
                channel.send({"error": pack_error(error)})
            else:
                channel.send({"result": result})
    except EOFError:
        pass  # the process of the engine has exited
    except BaseException as error:  # noqa: BLE001 the process ends here
        channel.send({"error": pack_error(error)})
    sys.stderr.flush()
    # Exit without cleanup: threads of collectives may wait for ranks that have exited.
    os._exit(0)


if __name__ == "__main__":
    main()
