"""Several ranks behind one engine: processes of their own, told the same things in the same order.

Invariant: the ranks live and die together, and with the actor. The kernel kills them when the thread that started them
ends, and when one of them ends the others are killed and the actor's process ends in the same way, so that its
supervisor starts all of them again and the trainer replays.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from broker.process import kill_group, spawn
from relax_actors.config import Config
from relax_actors.engines.megatron.calls import RankError, error_of, plain_batch, plain_sequences
from relax_actors.engines.megatron.wire import Channel
from relax_actors.engines.protocols.sequences import Sequences
from relax_actors.engines.protocols.training import StepResult, TrainBatch
from relax_actors.engines.protocols.whole_step import WholeStep
from relax_actors.runtime.exit_codes import EXIT_BLAMELESS

MODULE = "relax_actors.engines.megatron.mcore.rank"
OTHERS_SECONDS = 10.0
"""How long the other ranks have to finish a call that one of them could not; those that wait for it never will."""


def end_as(rank: int, code: int) -> None:
    """End this process as a rank ended, so that its supervisor judges it by that.

    Args:
        rank: that ended.
        code: of `waitpid`; negative for a signal.
    """
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    sys.stderr.write(f"rank {rank} of the trainer has ended: {how}; the group ends with it\n")
    sys.stderr.flush()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(EXIT_BLAMELESS)


class MegatronGroup(WholeStep):
    """The training engine of a configuration with more than one rank. Start it from the thread that uses it.

    Args:
        config: the run's.
        lost: called, in a thread of its own, when a rank has ended that nobody told to: with its number and exit code.
    """

    def __init__(self, config: Config, lost: Callable[[int, int], None] = end_as) -> None:
        super().__init__()
        self._lost, self._closing = lost, threading.Event()
        # One call at a time: weights are written by another thread than steps.
        self._calling = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._watchers: list[threading.Thread] = []
        start = {"config": config.model_dump(mode="json"), "rank": 0, "port": None}
        for _ in range(config.trainer.megatron.ranks):
            self._spawn(config.folder.absolute())
        try:
            first, *others = self._channels
            first.send(start)
            port = self._port(first)
            for rank, channel in enumerate(others, 1):
                channel.send(start | {"rank": rank, "port": port})
            self._gather()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The ranks' processes."""
        return [process.pid for process in self._processes]

    def _spawn(self, folder: Path) -> None:
        ours, theirs = socket.socketpair()
        rank = len(self._processes)
        # Folder and rank are for whoever looks a process up by its command line.
        command = [sys.executable, "-m", MODULE, str(theirs.fileno()), str(folder), str(rank)]
        process = spawn(command, log=2, pass_fds=(theirs.fileno(),))
        theirs.close()
        self._processes.append(process)
        self._channels.append(Channel(ours))
        watcher = threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Wait for a rank's end. One that ends with 0 has said why, and the call that hears it fails."""
        code = process.wait()
        if code != 0 and not self._closing.is_set():
            self._kill()
            self._lost(rank, code)

    def _port(self, channel: Channel) -> int:
        message = self._received(0, channel)
        if "error" in message:
            raise error_of(message["error"], 0)
        return int(message["port"])

    def _kill(self) -> None:
        self._closing.set()
        for process in self._processes:
            kill_group(process.pid)

    def close(self) -> None:
        """End the ranks."""
        self._kill()
        for watcher, channel in zip(self._watchers, self._channels, strict=True):
            watcher.join()
            channel.connection.close()

    def _received(self, rank: int, channel: Channel) -> Any:
        try:
            return channel.receive()
        except EOFError:
            self._gone(rank)

    def _gone(self, rank: int) -> NoReturn:
        """A rank does not answer: `lost` ends this process, or else this call."""
        self._watchers[rank].join()
        self._kill()
        msg = f"rank {rank} of the trainer has ended (exit code {self._processes[rank].returncode})"
        raise RankError(msg)

    def _call(self, name: str, *arguments: Any, progress: Callable[[], None] | None = None) -> Any:
        """Have all ranks do something; gives what rank 0 gave."""
        message = {"call": name, "arguments": arguments}
        with self._calling:
            for rank, channel in enumerate(self._channels):
                try:
                    channel.send(message)
                except EOFError:
                    self._gone(rank)
            return self._gather(progress)

    def _gather(self, progress: Callable[[], None] | None = None) -> Any:
        """Wait until each rank has answered.

        Raises:
            Exception: what a rank met. The group goes on if the others could finish, otherwise it is ended.
        """
        found: dict[int, Any] = {}
        errors: dict[int, Mapping[str, Any]] = {}
        deadline: float | None = None
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel.connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._kill()
                    break
                for key, _ in ready:
                    message = self._received(key.data, self._channels[key.data])
                    if "progress" in message:
                        if progress is not None:
                            progress()
                        continue
                    selector.unregister(key.fileobj)
                    if "error" in message:
                        errors[key.data] = message["error"]
                        deadline = deadline or time.monotonic() + OTHERS_SECONDS
                    else:
                        found[key.data] = message["done"]
        if errors:
            rank = min(errors, key=lambda one: (errors[one]["errno"] is None, one))
            raise error_of(errors[rank], rank)
        return found[0]

    def initialise(self, seed: int) -> None:
        """Take the folder's weights or random ones; see the protocol."""
        self._call("initialise", seed)

    def warm_start(self, sequences: Sequences, learning_rate: float, progress: Callable[[], None]) -> StepResult:
        """One supervised step; see the protocol."""
        return StepResult(self._call("warm_start", plain_sequences(sequences), learning_rate, progress=progress))

    def finish_warm_start(self) -> None:
        """A fresh optimizer, and the reference; see the protocol."""
        self._call("finish_warm_start")

    def step_on(self, batch: TrainBatch, step: int, progress: Callable[[], None]) -> StepResult:
        """One optimizer step; see `WholeStep`."""
        return StepResult(self._call("step", plain_batch(batch), step, progress=progress))

    def publish(self, path: Path) -> str:
        """Write the weights; see the protocol."""
        return str(self._call("publish", str(path)))

    def remember(self) -> None:
        """Take the weights for the base of the next delta; see the protocol."""
        self._call("remember")

    def delta(self) -> Callable[[Path], str] | None:
        """What writes the change since `remember`; see the protocol."""
        return partial(self._write_delta) if self._call("delta") else None

    def _write_delta(self, path: Path) -> str:
        return str(self._call("write_delta", str(path)))

    def fingerprint(self) -> str:
        """Fingerprint of the weights; see the protocol."""
        return str(self._call("fingerprint"))

    def save(self, folder: Path) -> None:
        """Write a checkpoint; see the protocol."""
        self._call("save", str(folder))

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Have each rank write its part meanwhile; see `SavesMeanwhile`."""
        self._call("begin_save", str(folder))
        return self._finish_save

    def _finish_save(self) -> None:
        self._call("finish_save")

    def load(self, folder: Path) -> None:
        """Take a checkpoint; see the protocol."""
        self._call("load", str(folder))

    def export(self, folder: Path) -> None:
        """Write a model folder; see the protocol."""
        self._call("export", str(folder))
