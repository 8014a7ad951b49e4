"""Rank processes behind one engine; every call goes to all ranks in the same order.

Invariant: the ranks start and end together, and with the actor. The kernel kills those of this node when the thread
that started them ends; those of other nodes end with their connections. When one rank exits, the others are killed and
the actor's process ends by the same signal, so its supervisor restarts the whole group and the role replays.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from broker.process import kill_group, spawn
from relax_actors.config import Config
from relax_actors.engines.protocols.backend import Ranks
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.training import StepResult
from relax_actors.engines.ranks.fair_lock import FairLock
from relax_actors.engines.ranks.rank_wire import wait_for_end
from relax_actors.engines.ranks.rpc import RankError, pack_samples, unpack_error
from relax_actors.engines.ranks.wire import Channel
from relax_actors.runtime.exit_codes import EXIT_BLAMELESS, EXIT_PEER_LOST

OnRankExit: TypeAlias = Callable[[int, int], None]
"""Called in a separate thread with the number and exit code of a rank that exited unexpectedly."""
MODULE = "relax_actors.engines.ranks.rank"
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4194304:glibc.malloc.hugetlb=1"}
"""glibc would keep the memory of tensors of up to 32 MiB after they are freed, in one benchmark
0.8 of 2.1 GiB. Huge pages save most of the time that mapping memory anew takes."""
LOOPBACK = "127.0.0.1"
"""Address of ranks that are all on one node."""
GRACE_SECONDS = 10.0
"""Time for the other ranks to finish a call that failed on one rank; ranks that wait for the failed rank never do."""


def exit_like_rank(role: str, rank: int, code: int) -> None:
    """End this process the way a rank ended, so that its supervisor judges the rank's exit.

    Args:
        role: role of the actor.
        rank: number of the rank that exited.
        code: exit code as `waitpid` gives it, negative for a signal; `EXIT_PEER_LOST` for a rank on another node, whose
            own supervisor judges its death.
    """
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if code == EXIT_PEER_LOST:
        how = "on another node: its connection ended"
    sys.stderr.write(f"rank {rank} of the {role} exited ({how}); ending the whole group\n")
    sys.stderr.flush()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(EXIT_PEER_LOST if code == EXIT_PEER_LOST else EXIT_BLAMELESS)


@dataclass(frozen=True, slots=True)
class JoinedRanks:
    """Ranks on other nodes, the last ones of a group.

    Attributes:
        host: address of this machine that all ranks can reach.
        channels: connections to them, in the order of their numbers.
    """

    host: str = LOOPBACK
    channels: Sequence[Channel] = ()


NO_OTHERS = JoinedRanks()


class RankGroup:
    """Ranks of one role, and the methods that a policy and a critic share. Create it in the thread that uses it.

    `accumulate` keeps sequences until there are `Ranks.parts` calls' worth, by default one for each data-parallel rank,
    or until `step`. The ranks thus compute the same micro-batches whether or not the rows of a step arrive together.

    Args:
        config: configuration of the run.
        role: "trainer" or "critic".
        ranks: how many there are, and how they share a step.
        on_rank_exit: by default this process ends like the rank.
        join: has the last ranks, on other nodes, join; by default all are on this one.
    """

    def __init__(
        self,
        config: Config,
        role: str,
        ranks: Ranks,
        on_rank_exit: OnRankExit | None,
        join: Callable[[], JoinedRanks] = lambda: NO_OTHERS,
    ) -> None:
        self._role, self._parts, self._closing = role, ranks.parts, threading.Event()
        self._on_rank_exit = on_rank_exit or partial(exit_like_rank, role)
        # One call at a time: the publisher's thread writes weights while the trainer's thread computes.
        self._turn = FairLock()
        # Sequences of the step that the ranks do not have yet, by call of `accumulate`.
        self._kept: list[Sequence[TrainSample]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._codes: dict[int, int] = {}
        self._watchers: list[threading.Thread] = []
        joined = join()
        try:
            for _ in range(ranks.count - len(joined.channels)):
                self._spawn(config.folder.absolute())
            self._start(config, joined)
        except BaseException:
            for channel in joined.channels:
                channel.connection.close()
            self.close()
            raise

    def _start(self, config: Config, joined: JoinedRanks) -> None:
        """Connect all ranks with each other, and wait until they have built their models."""
        own = len(self._channels)
        for channel in joined.channels:
            self._add(channel, self._watch_connection, channel.connection)
        roots = [str(config.store_path.absolute()), str(config.folder.absolute())]
        start: dict[str, Any] = {"role": self._role, "host": joined.host, "port": None}
        for rank, channel in enumerate(self._channels):
            # A rank on another node reads the configuration of its node, where folders may have other paths.
            here = {"config": config.model_dump(mode="json"), "device": rank}
            channel.send(start | {"rank": rank} | (here if rank < own else {"roots": roots, "device": 0}))
            if rank == 0:
                start["port"] = self._receive_port(channel)
        self._gather_results()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks on this node."""
        return [process.pid for process in self._processes]

    def _spawn(self, folder: Path) -> None:
        local, remote = socket.socketpair()
        rank = len(self._processes)
        # Folder, role and rank identify the process in `ps`; the process itself does not read them.
        command = [sys.executable, "-m", MODULE, str(remote.fileno()), str(folder), self._role, str(rank)]
        process = spawn(command, log=2, environment=ENVIRONMENT | os.environ, pass_fds=(remote.fileno(),))
        remote.close()
        self._processes.append(process)
        self._add(Channel(local), self._watch_process, process)

    def _add(self, channel: Channel, watch: Callable[[int, Any], None], watched: Any) -> None:
        rank = len(self._channels)
        self._channels.append(channel)
        watcher = threading.Thread(target=watch, args=(rank, watched), name=f"rank-{rank}", daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    def _watch_process(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until a rank exits; one that exits with 0 has sent its error, which fails the call."""
        self._ended(rank, process.wait())

    def _watch_connection(self, rank: int, connection: socket.socket) -> None:
        """Wait until the connection to a rank on another node ends."""
        wait_for_end(connection)
        self._ended(rank, EXIT_PEER_LOST)

    def _ended(self, rank: int, code: int) -> None:
        self._codes[rank] = code
        if code != 0 and not self._closing.is_set():
            self._kill()
            self._on_rank_exit(rank, code)

    def _receive_port(self, channel: Channel) -> int:
        message = self._receive(0, channel)
        if "error" in message:
            raise unpack_error(message["error"], 0)
        return int(message["port"])

    def _kill(self) -> None:
        self._closing.set()
        for process in self._processes:
            kill_group(process.pid)
        for channel in self._channels[len(self._processes) :]:
            with suppress(OSError):  # it has ended
                channel.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the ranks and close their sockets."""
        self._kill()
        for watcher, channel in zip(self._watchers, self._channels, strict=True):
            watcher.join()
            channel.connection.close()

    def _receive(self, rank: int, channel: Channel) -> Any:
        try:
            return channel.receive()
        except EOFError:
            self._raise_exited(rank)

    def _raise_exited(self, rank: int) -> NoReturn:
        """Fail the call because a rank exited, unless `on_rank_exit` ends this process first."""
        self._watchers[rank].join()
        self._kill()
        msg = f"rank {rank} of the {self._role} exited with code {self._codes[rank]}; restart the {self._role}"
        raise RankError(msg)

    def _call(self, name: str, *arguments: Any, progress: Callable[[], None] | None = None) -> Any:
        """Call a method on all ranks; returns the result of rank 0."""
        return self._call_all(name, *arguments, progress=progress)[0]

    def _call_all(self, name: str, *arguments: Any, progress: Callable[[], None] | None = None) -> list[Any]:
        """Call a method on all ranks; returns their results by rank."""
        message = {"call": name, "arguments": arguments}
        with self._turn:
            for rank, channel in enumerate(self._channels):
                try:
                    channel.send(message)
                except EOFError:
                    self._raise_exited(rank)
            return self._gather_results(progress)

    def _gather_results(self, progress: Callable[[], None] | None = None) -> list[Any]:
        """Wait for the answers of all ranks; returns their results by rank.

        Raises:
            Exception: error of a rank. If the other ranks finish within `GRACE_SECONDS` the group remains usable,
                otherwise it is killed.
        """
        results: dict[int, Any] = {}
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
                    message = self._receive(key.data, self._channels[key.data])
                    if "progress" in message:
                        if progress is not None:
                            progress()
                        continue
                    selector.unregister(key.fileobj)
                    if "error" in message:
                        errors[key.data] = message["error"]
                        deadline = deadline or time.monotonic() + GRACE_SECONDS
                    else:
                        results[key.data] = message["result"]
        if errors:
            rank = min(errors, key=lambda number: (errors[number]["errno"] is None, number))
            raise unpack_error(errors[rank], rank)
        return [results[rank] for rank in sorted(results)]

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Accumulate the gradients of sequences, or keep the sequences; see `AccumulatesSteps`."""
        self._kept.append(samples)
        progress()
        if len(self._kept) == self._parts:
            self._accumulate_kept(progress)

    def _accumulate_kept(self, progress: Callable[[], None]) -> None:
        kept, self._kept = self._kept, []
        if kept:
            samples = [sample for part in kept for sample in part]
            self._call("accumulate", pack_samples(samples), progress=progress)

    def discard(self) -> None:
        """Discard the accumulated gradients; see `AccumulatesSteps`."""
        self._kept.clear()
        self._call("discard")

    def step(self, step: int, progress: Callable[[], None]) -> StepResult:
        """Take one optimizer step; see `AccumulatesSteps`."""
        self._accumulate_kept(progress)
        return StepResult(**self._call("step", step, progress=progress))

    def fingerprint(self) -> str:
        """Fingerprint of the weights; see `SavesState`."""
        return str(self._call("fingerprint"))

    def save(self, folder: Path) -> None:
        """Write a checkpoint; see `SavesState`."""
        self._call("save", str(folder))

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Write a checkpoint in the background, each rank its part; see `SupportsAsyncSave`."""
        self._call("begin_save", str(folder))
        return self._finish_save

    def _finish_save(self) -> None:
        self._call("finish_save")

    def load(self, folder: Path) -> None:
        """Load a checkpoint; see `SavesState`."""
        self._kept.clear()
        self._call("load", str(folder))

    def release_memory(self, folder: Path | None) -> int:
        """Move the memory of all ranks off their devices, all at once; see `ReleasesMemory`."""
        return sum(self._call_all("release_memory", None if folder is None else str(folder)))

    def resume_memory(self) -> int:
        """Move it back; see `ReleasesMemory`."""
        return sum(self._call_all("resume_memory"))

    def export(self, folder: Path) -> None:
        """Write a model folder; see `WeightProducer` and `CriticEngine`."""
        self._call("export", str(folder))
