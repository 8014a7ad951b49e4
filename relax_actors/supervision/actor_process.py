"""Process of one actor: connects, builds the role, and runs its pump until it is stopped or fails.

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
from typing import Any

import nats.errors
import pykka
import structlog

from broker.address import Address
from broker.connection import Connection
from broker.leases import RunState
from broker.store import Store
from broker.streams import CONSUMER_SECONDS, open_bucket
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.config import Config
from relax_actors.config.rows import spot_backlog
from relax_actors.devices.binding import bind_to_cores
from relax_actors.errors import AllRowsFailedError, BrokerUnreachableError, ConfigError, FencedError, RelaxError
from relax_actors.isolation.orphans import ZombieReaper
from relax_actors.roles import make_role, section_of
from relax_actors.runtime import Context, Role, StatefulRole, logs
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.device_files import device_locks
from relax_actors.runtime.device_lock import DeviceLock
from relax_actors.runtime.exit_codes import (
    EXIT_ALL_ROWS_FAILED,
    EXIT_BLAMELESS,
    EXIT_BROKER_UNREACHABLE,
    EXIT_CONFIG,
    EXIT_CRASHED,
)
from relax_actors.runtime.follower_pump import FollowerPump
from relax_actors.runtime.handler import BLAMELESS_ERRORS
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.pool_pump import PoolPump
from relax_actors.runtime.pump import Pump
from relax_actors.runtime.role_actor import RoleActor, Setup
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.runtime.service_role import ServicePump, ServiceRole
from relax_actors.runtime.user_code import running_version
from relax_actors.runtime.watchdog import DiskSpaceWait, Watchdog, limit_memory
from relax_actors.supervision.assignment import is_spot
from relax_actors.supervision.outcome import StatusPipe
from relax_actors.supervision.spec import ON_TRIAL, RETURN_ROWS

BEAT_SECONDS = 1.0
REAP_SECONDS = 60.0
FLUSH_SECONDS = 0.5
"""Seconds for the events of an actor that returns its rows to be stored."""
OUTER_PID = "RELAX_OUTER_PID"
"""Environment variable with the process id by which the supervisor knows an actor in a sandbox."""
log = structlog.get_logger()


class ActorProcess:
    """One incarnation of an actor."""

    def __init__(self, folder: RunFolder, role: str, n: int) -> None:
        self.status = StatusPipe()
        self.folder, self.role_name, self.n = folder, role, n
        self.box = BlackBox(folder.black_box(f"{role}.{n}"))
        self.stopping = asyncio.Event()
        self._pump: Pump[Any] | None = None
        self._returning: asyncio.Task[None] | None = None
        self.device_lock: DeviceLock | None = None
        self.config: Config = folder.load_config()
        self.settings = section_of(self.config, role)

    def run(self) -> None:
        """Run the actor until it is stopped."""
        if self.settings.memory_limit_mib is not None:
            limit_memory(self.settings.memory_limit_mib)
        code = self._code()
        role = make_role(self.config, self.role_name)
        role.context = context = self._connect()
        connection = context.table.connection
        stop = functools.partial(connection.loop.call_soon_threadsafe, self._stop)

        def on_sigterm(*_: object) -> None:
            self.status.stop_requested()
            stop()

        signal.signal(signal.SIGTERM, on_sigterm)
        signal.signal(RETURN_ROWS, lambda *_: connection.loop.call_soon_threadsafe(self._return_rows, context))
        connection.call(self._run_role(role, code), threading.TIMEOUT_MAX)
        connection.close()

    def _connect(self) -> Context:
        """Connect to the broker, take the next incarnation, and build the role's context."""
        address = Address.load(self.folder.address).for_user(self.role_name)
        connection = Connection(address, f"{self.role_name}.{self.n}", deadline=30.0)
        subjects = Subjects(self.config.run.name)
        state = RunState(connection, connection.call(open_bucket(connection, subjects), CONSUMER_SECONDS + 1))
        incarnation = connection.call(state.next_incarnation(self.role_name, self.n), 30)
        store = Store(self.config.store_path)
        author = f"{self.role_name}.{self.n}#{incarnation}"
        table = Table(connection, subjects, store, author, direct=self.config.broker.replicas == 1)
        journal = Journal(connection, subjects, self.role_name, self.n)
        context = Context(
            config=self.config,
            folder=RunFolder(self.config.folder),
            role=self.role_name,
            n=self.n,
            incarnation=incarnation,
            table=table,
            state=state,
            journal=journal,
            stopping=self.stopping.is_set,
            fail=self.crash,
            node_folder=self.folder.root,
            on_trial=ON_TRIAL in os.environ,
        )
        if is_spot(self.folder):
            context.backlog = spot_backlog(self.config)
        context.wait_for_room = store.on_full = DiskSpaceWait(context, self.config.store.patience)
        table.patience = self.config.store.patience
        if paths := device_locks(self.config, self.role_name):
            placement = self.config.placement
            folder = paths[0].parent if placement.release == "disk" else None
            lock = DeviceLock(paths, context, placement.patience, turn=placement.longest_turn, folder=folder)
            context.device_lock = self.device_lock = lock
            context.yields_device = lock.is_due
            if placement.release != "none":
                context.shares_memory = self.device_lock.add
        return context

    def _code(self) -> str:
        """Return the version of the user's code that an import would load now."""
        return running_version(self.config, self.role_name, Path(self.folder.import_path))

    async def _run_role(self, role: Role, code: str) -> None:
        """Run a role until the actor is stopped.

        Args:
            role: with its context.
            code: version of the user's code before the role was imported.
        """
        settings = self.settings
        watch = Watchdog(role.context, self.box, settings.deadline, self.status.failed, settings.memory_limit_mib)
        actor = RoleActor.start(role, watch)
        await actor.ask(Setup(), block=False)
        # Of files that were edited during the start, either version may be imported.
        code = code if code == self._code() else ""
        watch.start_waiting("requests" if isinstance(role, ServiceRole) else "its first row")
        pump = _make_pump(role, actor, watch)
        # Two tasks: while the broker is unreachable the lease cannot be renewed, but signs of life must go on.
        tasks = [
            asyncio.create_task(self._beat(watch)),
            asyncio.create_task(self._publish_status(role, watch, pump, code)),
        ]
        self.status.ready()
        self._pump = pump
        if self.stopping.is_set():
            pump.wake()
        await pump.run(self.stopping)
        for task in tasks:
            task.cancel()
        await asyncio.to_thread(actor.stop)
        await role.context.state.release_lease(self.role_name, self.n)

    async def _beat(self, watch: Watchdog) -> None:
        """Record signs of life for the supervisor."""
        seconds = min(BEAT_SECONDS, self.config.supervision.heartbeat / 4)
        zombies, reaped = ZombieReaper(), time.monotonic()
        while True:
            watch.check()
            if time.monotonic() - reaped > REAP_SECONDS:
                reaped = time.monotonic()
                zombies.reap()
            await asyncio.sleep(seconds)

    async def _publish_status(self, role: Role, watch: Watchdog, pump: Pump[Any], code: str) -> None:
        """Publish the actor's metrics and renew its lease, once a second."""
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
                    **(self.device_lock.metrics() if self.device_lock else {}),
                    **self._role_metrics(role),
                }
            )
            lease = {
                "pid": int(os.environ.get(OUTER_PID, os.getpid())),
                "incarnation": role.context.incarnation,
                "since": round(started, 3),
                "rows": list(reading.rows),
                "waits_for": reading.waiting_for,
                "doing_since": reading.since,
                "handled": handled,
                "has_worked": role.has_worked(handled),
                "code": code,
            }
            if (version := role.weights_version()) is not None:
                lease["weights"] = version
            try:
                await role.context.state.renew_lease(self.role_name, self.n, lease, ttl)
            except Exception as error:  # noqa: BLE001 a late lease must not end the actor
                log.debug("lease_not_renewed", error=str(error))
            last = (handled, busy, cpu, now)
            await asyncio.sleep(BEAT_SECONDS)

    @staticmethod
    def _role_metrics(role: Role) -> dict[str, float]:
        try:
            return role.metrics()
        except Exception as error:  # noqa: BLE001 a metric must not end the actor
            log.warning("metrics_failed", error=f"{type(error).__name__}: {error}")
            return {}

    def _stop(self) -> None:
        self.stopping.set()
        if self._pump is not None:
            self._pump.wake()

    def _return_rows(self, context: Context) -> None:
        if self._returning is None and self._pump is not None:
            self.status.stop_requested()
            self._returning = asyncio.create_task(self._give_back(self._pump, context))

    async def _give_back(self, pump: Pump[Any], context: Context) -> None:
        """Return the rows in hand to the pool and end, before the supervisor kills the process."""
        if (rows := await pump.give_back()) is None:
            return
        if rows:
            context.journal.event("rows_returned", rows=rows)
        with contextlib.suppress(RelaxError, nats.errors.Error):
            await context.state.release_lease(self.role_name, self.n)
        await asyncio.to_thread(context.journal.flush, FLUSH_SECONDS)
        os._exit(0)

    def crash(self, error: BaseException) -> None:
        """End the process as crashed at once, and report the reason to the supervisor."""
        code = EXIT_BLAMELESS if isinstance(error, BLAMELESS_ERRORS) else EXIT_CRASHED
        if isinstance(error, BrokerUnreachableError):
            code = EXIT_BROKER_UNREACHABLE
        if isinstance(error, AllRowsFailedError):
            code = EXIT_ALL_ROWS_FAILED
        text = (
            str(error)
            if isinstance(error, FencedError | AllRowsFailedError)
            else "".join(traceback.format_exception(error))
        )
        self.status.failed(text)
        with contextlib.suppress(OSError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        os._exit(code)


def _make_pump(role: Role, actor: pykka.ActorRef[RoleActor], watch: Watchdog) -> Pump[Any]:
    if isinstance(role, StatefulRole):
        return FollowerPump(role, actor, watch)
    if isinstance(role, ServiceRole):
        return ServicePump(role)
    return PoolPump(role, actor, watch)


def main(arguments: list[str]) -> None:
    """Run the process of an actor; the entry point for a new process and for a fork of the zygote."""
    folder, role, n = RunFolder(Path(arguments[0])), arguments[1], int(arguments[2])
    bind_to_cores()
    logs.configure()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    actor: ActorProcess | None = None
    try:
        actor = ActorProcess(folder, role, n)
        actor.run()
    except ConfigError as error:
        (actor.status if actor else StatusPipe()).failed(str(error))
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(EXIT_CONFIG)
    except BaseException as error:  # noqa: BLE001 the process ends here
        if actor is None:
            StatusPipe().failed("".join(traceback.format_exception(error)))
            traceback.print_exc()
            os._exit(EXIT_CRASHED)
        actor.crash(error)
    sys.stderr.flush()
    # Engines leave threads behind that need no orderly end.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
