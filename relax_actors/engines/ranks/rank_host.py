"""Rank of a trainer on this node: a process that an actor starts when the trainer invites it.

Invariant: at most one rank at a time, of the newest group. The rank ends with its group: when the connection to the
trainer ends, when a newer group invites, and with the actor.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog
import xxhash

from broker.process import kill_group, spawn
from relax_actors.config import Config
from relax_actors.data.adapter import CONFIG, WEIGHTS
from relax_actors.devices.inventory import VISIBLE
from relax_actors.engines.ranks.rank_group import ENVIRONMENT, MODULE, OnRankExit
from relax_actors.engines.ranks.rank_wire import keep, send_token, wait_for_end, wait_for_exit
from relax_actors.messages.ranks import RankInvitation
from relax_actors.runtime.code_version import rank_version

CONNECT_SECONDS = 10.0
GRACE_SECONDS = 2.0
"""Time for a rank to notice the end of its group; a rank that waits for a dead peer never notices."""
log = structlog.get_logger()


def settings_digest(config: Config) -> str:
    """Digest of the settings and the model that all ranks of a trainer must share; devices may differ."""
    trainer, model = config.trainer.model_copy(update={"device": ""}), config.model_path
    parts = [trainer.model_dump_json(), config.algorithm.model_dump_json()]
    parts.append(f"{config.rollout.temperature} {config.run.seed} {config.run.deterministic} {config.head_precision}")
    parts += [path.read_text() for path in [model / "config.json"] if path.exists()]
    parts += [f"{path.name} {path.stat().st_size}" for path in sorted(model.glob("*.safetensors"))]
    if config.lora is not None:
        parts.append(config.lora.model_dump_json(exclude={"path"}))
        files = [] if config.lora.path is None else [config.lora.path / name for name in (CONFIG, WEIGHTS)]
        parts += [xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in files if path.exists()]
    return xxhash.xxh3_64_hexdigest("\n".join(parts).encode())


def rank_platform() -> str:
    """Return what a rank of this process computes with: code, libraries, and GPUs or not, in one line."""
    return f"{rank_version()}, on {'GPUs' if os.environ.get(VISIBLE) else 'the CPU'}"


class RankHost:
    """Hosts the ranks of successive groups, one after the other. Methods are called in one thread.

    The rank reads the configuration from the node's `folder`; `on_rank_exit` is called in another thread when the rank
    ended by itself.
    """

    def __init__(self, config: Config, folder: Path, on_rank_exit: OnRankExit) -> None:
        self._settings = settings_digest(config)
        self._folder, self._on_rank_exit = folder, on_rank_exit
        self._newest = 0
        self._rank: _Rank | None = None

    def problem_with(self, invitation: RankInvitation) -> str:
        """Return why this actor cannot join; empty if it can."""
        if invitation.platform != (own := rank_platform()):
            return (
                f"it runs {own}, and the trainer {invitation.platform}: install the same versions on both nodes, and "
                "give both GPUs or neither"
            )
        if invitation.settings != self._settings:
            return (
                "it has another model, or other settings of [trainer], [algorithm], [lora], run.seed, "
                "run.deterministic or rollout.temperature than the trainer: start its node without such settings, on "
                "the same model"
            )
        if invitation.incarnation < self._newest:
            return f"a trainer of incarnation {invitation.incarnation} asks, and incarnation {self._newest} was here"
        return ""

    def join(self, invitation: RankInvitation) -> None:
        """End the rank of the group before, if there is one, and start one; returns at once."""
        self._newest = invitation.incarnation
        log.info("joining", group=invitation.group, rank=invitation.rank, incarnation=invitation.incarnation)
        self._rank = _Rank(invitation, self._folder, self._on_rank_exit, self._leave())
        self._rank.start()

    def _leave(self) -> Callable[[], None]:
        before, self._rank = self._rank, None
        if before is None:
            return lambda: None
        before.end()
        return before.join

    @property
    def is_hosting(self) -> bool:
        """Whether a rank lives."""
        return self._rank is not None and self._rank.is_alive()

    def close(self) -> None:
        """End the rank."""
        self._leave()()


class _Rank(threading.Thread):
    """Connects to the trainer, and runs the rank's process, which the kernel kills with this thread."""

    def __init__(
        self, invitation: RankInvitation, folder: Path, on_exit: OnRankExit, wait_for_previous: Callable[[], None]
    ) -> None:
        super().__init__(name=f"rank-{invitation.rank}", daemon=True)
        self._invitation, self._folder, self._on_exit = invitation, folder, on_exit
        self._wait_for_previous = wait_for_previous
        self._guard = threading.Lock()
        self._is_over = False
        self._pid: int | None = None
        self._connection: socket.socket | None = None

    def end(self) -> None:
        """Kill the rank; callable from any thread."""
        with self._guard:
            self._is_over = True
            if self._pid is not None:
                kill_group(self._pid)
            if self._connection is not None:
                with suppress(OSError):  # it has ended
                    self._connection.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Host the rank until it ends."""
        self._wait_for_previous()
        invitation = self._invitation
        try:
            connection = socket.create_connection((invitation.host, invitation.port), CONNECT_SECONDS)
        except OSError as error:
            # The trainer gave this group up, or is out of reach: it waits for its ranks, and invites again.
            log.warning("trainer_not_reached", host=invitation.host, port=invitation.port, error=str(error))
            return
        with connection:
            keep(connection)
            with suppress(OSError):
                send_token(connection, invitation.token, invitation.rank)
            code = self._host(connection)
        if code:
            self._on_exit(invitation.rank, code)

    def _host(self, connection: socket.socket) -> int:
        """Run the process; return its exit code, or 0 if its group ended first."""
        command = [sys.executable, "-m", MODULE, str(connection.fileno()), str(self._folder), "trainer"]
        command.append(str(self._invitation.rank))
        process = spawn(command, log=2, environment=ENVIRONMENT | os.environ, pass_fds=(connection.fileno(),))
        with self._guard:
            self._pid, self._connection = process.pid, connection
            if self._is_over:
                kill_group(process.pid)
        descriptor = os.pidfd_open(process.pid)
        try:
            if group_ended := wait_for_end(connection, descriptor):
                wait_for_exit(descriptor, GRACE_SECONDS)
            with self._guard:
                # Under the guard: the number of a process that was waited for may be that of another one.
                group_ended, self._pid = group_ended or self._is_over, None
                kill_group(process.pid)
                code = process.wait()
            if not group_ended and code == 0:
                # Its last message is the error that ended it: the trainer reads it, and ends the group.
                wait_for_end(connection)
        finally:
            os.close(descriptor)
            with self._guard:
                self._connection = None
        return 0 if group_ended else code
