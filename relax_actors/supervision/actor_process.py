"""The process of one actor: connects, builds the role, runs its pump, and ends when told or when it must.

Started by the node's supervisor as `python -m relax_actors.supervision.actor_process <run folder> <role> <n>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import structlog

from broker.address import Address
from broker.connection import Connection
from broker.leases import RunState
from broker.store import Store
from broker.streams import ensure_bucket
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.config import Config
from relax_actors.errors import BrokerUnreachableError, ConfigError, FencedError
from relax_actors.roles import make_role, section_of
from relax_actors.runtime import logs
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.device_lock import Turns
from relax_actors.runtime.exit_codes import EXIT_AWAY, EXIT_BLAMELESS, EXIT_CONFIG, EXIT_CRASHED
from relax_actors.runtime.follower import FollowPump
from relax_actors.runtime.handler import NOT_THE_ROWS
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.mailbox import Mailbox, ask
from relax_actors.runtime.pump import PoolPump
from relax_actors.runtime.role import Context, Role, StatefulRole
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.runtime.watchdog import RoomWait, Watch, bound_memory
from relax_actors.supervision.outcome import Status

BEAT_SECONDS = 1.0
log = structlog.get_logger()


class Host:
    """One life of an actor."""

    def __init__(self, folder: RunFolder, role: str, n: int) -> None:
        self.status = Status()
        self.folder, self.role_name, self.n = folder, role, n
        self.box = BlackBox(folder.box(f"{role}.{n}"))
        self.stopping = asyncio.Event()
        self._pump: FollowPump | PoolPump | None = None
        self.turns: Turns | None = None
        self.config: Config = folder.load_config()
        self.settings = section_of(self.config, role)

    def run(self) -> None:
        """Live; returns at an orderly end."""
        if self.settings.memory_limit_mib is not None:
            bound_memory(self.settings.memory_limit_mib)
        role = make_role(self.config, self.role_name)
        address = Address.load(self.folder.address).for_user(self.role_name)
        connection = Connection(address, f"{self.role_name}.{self.n}", deadline=30.0)
        subjects = Subjects(self.config.run.name)
        bucket = connection.call(ensure_bucket(connection, subjects, self.config.broker.replicas), 30)
        state = RunState(connection, bucket)
        incarnation = connection.call(state.next_incarnation(self.role_name, self.n), 30)
        store = Store(self.config.store_path)
        author = f"{self.role_name}.{self.n}#{incarnation}"
        table = Table(connection, subjects, store, author, direct=self.config.broker.replicas == 1)
        journal = Journal(connection, subjects, self.role_name, self.n)
        role.context = Context(
            config=self.config,
            folder=RunFolder(self.config.folder),
            role=self.role_name,
            n=self.n,
            incarnation=incarnation,
            table=table,
            state=state,
            journal=journal,
            stopping=self.stopping.is_set,
        )
        role.context.wait_for_room = store.on_full = RoomWait(role.context, self.config.store.patience)
        table.patience = self.config.store.patience
        device = self.config.placement.device_of(self.role_name)
        if device is not None:
            patience = self.config.placement.patience
            self.turns = Turns(role.context.folder.device(device), role.context, patience)
            role.context.turn = self.turns
        stop = functools.partial(connection.loop.call_soon_threadsafe, self._stop)

        def told(*_: object) -> None:
            self.status.told()
            stop()

        signal.signal(signal.SIGTERM, told)
        connection.call(self._live(role), threading.TIMEOUT_MAX)
        connection.close()

    async def _live(self, role: Role) -> None:
        mailbox = Mailbox.start()
        settings = self.settings
        watch = Watch(role.context, self.box, settings.deadline, self.status.failed, settings.memory_limit_mib)
        watch.thread_id = await ask(mailbox, threading.get_ident)
        await ask(mailbox, role.setup)
        watch.end("its first row")
        pump: FollowPump | PoolPump
        if isinstance(role, StatefulRole):
            pump = FollowPump(role, role.context, mailbox, watch)
        else:
            pump = PoolPump(role, role.context, mailbox, watch, self.crash)
        # Apart: a broker that is away holds up what is told to it, and no sign of life.
        beating = [asyncio.create_task(self._beat(watch)), asyncio.create_task(self._tell(role, watch, pump))]
        self.status.ready()
        self._pump = pump
        if self.stopping.is_set():
            pump.wake()
        await pump.run(self.stopping)
        for task in beating:
            task.cancel()
        await ask(mailbox, role.close)
        await role.context.state.release_lease(self.role_name, self.n)

    async def _beat(self, watch: Watch) -> None:
        """Signs of life for the supervisor."""
        seconds = min(BEAT_SECONDS, self.config.supervision.heartbeat / 4)
        while True:
            watch.check()
            await asyncio.sleep(seconds)

    async def _tell(self, role: Role, watch: Watch, pump: FollowPump | PoolPump) -> None:
        """A lease for the world, numbers for the monitors."""
        started = time.time()
        last = (0, 0.0, time.process_time(), time.monotonic())
        ttl = max(2.0, role.context.config.supervision.heartbeat)
        while True:
            handled, busy, cpu, now = pump.handled, watch.busy_seconds, time.process_time(), time.monotonic()
            span = max(now - last[3], 1e-6)
            reading = self.box.read()
            role.context.journal.metric(
                {
                    "rows": handled,
                    "rows_per_second": round((handled - last[0]) / span, 2),
                    "busy": round((busy - last[1]) / span, 3),
                    "cpu": round((cpu - last[2]) / span, 3),
                    "cpu_seconds": round(cpu, 3),
                    "busy_seconds": round(busy, 3),
                    "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                    **({"turn_wait_seconds": round(self.turns.waited_seconds, 3)} if self.turns else {}),
                    **self._own_metrics(role),
                }
            )
            lease = {
                "pid": os.getpid(),
                "incarnation": role.context.incarnation,
                "since": round(started, 3),
                "rows": list(reading.rows),
                "waits_for": reading.waits_for,
                "doing_since": reading.since,
            }
            try:
                await role.context.state.renew_lease(self.role_name, self.n, lease, ttl)
            except Exception as error:  # noqa: BLE001 a lease that is late is no reason to die
                log.debug("lease_not_renewed", error=str(error))
            last = (handled, busy, cpu, now)
            await asyncio.sleep(BEAT_SECONDS)

    @staticmethod
    def _own_metrics(role: Role) -> dict[str, float]:
        try:
            return role.metrics()
        except Exception as error:  # noqa: BLE001 what only measures must not stop the signs of life
            log.warning("metrics_failed", error=f"{type(error).__name__}: {error}")
            return {}

    def _stop(self) -> None:
        self.stopping.set()
        if self._pump is not None:
            self._pump.wake()

    def crash(self, error: BaseException) -> None:
        """End the process as crashed, at once, with the reason for the supervisor."""
        code = EXIT_BLAMELESS if isinstance(error, NOT_THE_ROWS) else EXIT_CRASHED
        if isinstance(error, BrokerUnreachableError):
            code = EXIT_AWAY
        text = str(error) if isinstance(error, FencedError) else "".join(traceback.format_exception(error))
        self.status.failed(text)
        with contextlib.suppress(OSError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        os._exit(code)


def main(arguments: list[str]) -> None:
    """Entry point of an actor's process."""
    folder, role, n = RunFolder(Path(arguments[0])), arguments[1], int(arguments[2])
    logs.configure()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    host: Host | None = None
    try:
        host = Host(folder, role, n)
        host.run()
    except ConfigError as error:
        (host.status if host else Status()).failed(str(error))
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(EXIT_CONFIG)
    except BaseException as error:  # noqa: BLE001 the process ends here
        if host is None:
            Status().failed("".join(traceback.format_exception(error)))
            traceback.print_exc()
            os._exit(EXIT_CRASHED)
        host.crash(error)
    sys.stderr.flush()
    # Engines leave threads behind; nothing of theirs needs an orderly end.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
