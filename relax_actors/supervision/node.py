"""Node: the supervisor of one machine, with a pool for each role and a process for each actor.

Started by the run's root through `lean_process`, with the run folder as its argument. When a pool gives up, all pools
are stopped, a report is written, and the root ends the run.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import nats.errors

from broker.address import Address
from broker.connection import Connection
from broker.leases import RunState
from broker.permissions import NODE
from broker.streams import CONSUMER_SECONDS, open_bucket
from broker.subjects import Subjects
from relax_actors.config import Config
from relax_actors.config.load import CODE_VARIABLE
from relax_actors.devices.machine import MachineWatch
from relax_actors.errors import BrokerUnreachableError, ConfigError, RelaxError
from relax_actors.isolation.janitor import is_janitor
from relax_actors.isolation.orphans import kill_orphans
from relax_actors.registry.catalog import ROLES
from relax_actors.roles import built_in_spec, section_of
from relax_actors.runtime import logs
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.exit_codes import (
    EXIT_BLAMELESS,
    EXIT_BROKER_UNREACHABLE,
    EXIT_CONFIG,
    EXIT_CRASHED,
    EXIT_GAVE_UP,
)
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.runtime.user_code import kept_code
from relax_actors.supervision.assignment import Assignment, is_client
from relax_actors.supervision.config_watcher import ConfigWatcher
from relax_actors.supervision.environment import without_secrets
from relax_actors.supervision.gpu_leases import GpuLeases
from relax_actors.supervision.launch import Launch, StartError
from relax_actors.supervision.outcome import StatusPipe
from relax_actors.supervision.ownership import NodeLeases
from relax_actors.supervision.pools import SERVER, pools_of, secrets_of, server_launch
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.reporter import Reporter, split_child_id, supervision_metric
from relax_actors.supervision.sandbox import KEEPER_MODULE, is_sandboxed
from relax_actors.supervision.spec import ON_TRIAL, Failure
from relax_actors.supervision.supervisor import GiveUp
from relax_actors.supervision.zygote import ACTOR_MODULE, PRELOADED, PRELOADED_SIMULATED
from relax_actors.supervision.zygote_client import REPLY_SECONDS, Zygote

BEAT_SECONDS = 1.0
GRACE_SECONDS = 30.0


def actor_environment(config: Config) -> dict[str, str]:
    """Return the environment variables of the actors' processes."""
    threads = str(config.run.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Sets and dictionaries of strings must have one order in every incarnation: some task generators depend on it.
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # setproctitle would overwrite the environment in /proc, by which the tree's janitor knows its processes.
        "SPT_NOENV": "1",
        # By default glibc gives threads heaps of their own, and what is free in one serves no other: hundreds of MiB
        # with a model of 135 M parameters.
        "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1"),
        # By default glibc returns a freed tensor to the kernel, and the next one faults in the same pages: 5,000 faults
        # in a training step of 2,000 tokens, instead of 300.
        "MALLOC_TRIM_THRESHOLD_": os.environ.get("MALLOC_TRIM_THRESHOLD_", str(256 << 20)),
        "MALLOC_MMAP_THRESHOLD_": os.environ.get("MALLOC_MMAP_THRESHOLD_", str(32 << 20)),
    }


class HeartbeatThread(threading.Thread):
    """Records the node's signs of life while its supervisor's loop runs, and renews its leases.

    The loop may take a while for an iteration, since it starts actors. A loop that has not run for
    `REPLY_SECONDS + GRACE_SECONDS` gets no sign of life, so that the root restarts the node.

    Attributes:
        last_loop: returns when the loop last ran, in seconds on the monotonic clock.
        renew_leases: called every second while the loop runs.
        watch_config: called every second.
    """

    def __init__(self, box: BlackBox) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._box = box
        self.last_loop = time.monotonic
        self.renew_leases: Callable[[], object] = lambda: None
        self.watch_config: Callable[[], object] = lambda: None

    def run(self) -> None:
        """Run until the process ends."""
        while True:
            if time.monotonic() - self.last_loop() < REPLY_SECONDS + GRACE_SECONDS:
                self._box.beat()
                self.renew_leases()
            self.watch_config()
            time.sleep(BEAT_SECONDS)


class Node:
    """One incarnation of a node."""

    def __init__(self, folder: RunFolder, status: StatusPipe) -> None:
        self._folder, self._status, self._began = folder, status, time.time()
        fingerprint = folder.config_fingerprint()
        self._config = config = folder.load_config()
        self._heartbeat = HeartbeatThread(BlackBox(folder.black_box("node")))
        self._heartbeat.start()
        self._assignment = node = Assignment.load(folder, config)
        self._environment = actor_environment(config)
        self._forked = forked_roles(config, node.roles)
        self._zygote = _zygote(config, folder, self._environment, self._forked, self._on_importing)
        if self._forked:
            # Its import takes longest of all at a start, so it begins before the broker is there.
            self._zygote.start()
        self._connection = Connection(Address.load(folder.address).for_user(NODE), "node", deadline=30.0)
        bucket = open_bucket(self._connection, Subjects(config.run.name))
        state = RunState(self._connection, self._connection.call(bucket, CONSUMER_SECONDS + 1))
        self._leases = NodeLeases(self._connection, state, node, max(2.0, config.supervision.heartbeat))
        self._leases.claim()
        self._journal = Journal(self._connection, Subjects(config.run.name), "node", node.number)
        self._reporter = Reporter(folder, self._connection, state, self._journal)
        self._tree = self._process_tree()
        inventory = node.gpus.inventory()
        self._machine = MachineWatch(folder.root, inventory)
        self._machine.start()
        self._gpus = GpuLeases(
            f"run {config.run.name}, node {node.number}",
            lambda: self._watcher.node,
            inventory,
            lambda: {_computes_as(child) for child in self._tree.children()},
        )
        self._zygote_name = f"zygote of node {node.number}" if node.number else "zygote"
        self._watcher = ConfigWatcher(folder, fingerprint, self._tree, config, node)

    def _process_tree(self) -> ProcessTree:
        config = self._config
        pools = pools_of(config, self._assignment, random.Random(os.getpid()))  # noqa: S311 jitter
        for child in (child for pool in pools.values() for child in pool.children):
            self._reporter.release_deliveries(child)
        heartbeat = config.supervision.heartbeat
        return ProcessTree(pools, self._launch, self._reporter, heartbeat, self._zygote.check_health)

    def run(self) -> int:
        """Supervise until stopped; return the process's exit code."""
        self._leases.on_lost = self._tree.stop
        self._heartbeat.last_loop = lambda: self._tree.last_loop
        self._heartbeat.renew_leases = self._renew_leases
        self._heartbeat.watch_config = self._watcher
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._status.ready()
        self._tree.is_spared = lambda pid: pid in self._zygote.pids() or is_janitor(pid)
        report = self._tree.run()
        self._heartbeat.renew_leases = lambda: None
        with suppress(RelaxError, nats.errors.Error):
            self._leases.drop()
        self._zygote.close()
        kill_orphans((), is_janitor)
        self._connection.close()
        return 0 if report is None else self._gave_up(report)

    def _on_importing(self, seconds: float) -> None:
        """Report that actors wait for the zygote's import; called by the loop of the tree."""
        self._journal.event("waiting_for_import", role="zygote", seconds=seconds)

    def _launch(self, child: str) -> Launch:
        role, n = split_child_id(child)
        config, code = self._watcher.config, self._watcher.node.code_of(child)
        leased = self._gpus.environment(_computes_as(child))
        if code is not None:
            if (copy := kept_code(config.store_path, code.version)) is None:
                msg = f"the copy {code.version} of its code is not complete in {config.store_path}; restore it"
                raise StartError(msg)
            leased[CODE_VARIABLE] = str(copy)
        if child in self._watcher.node.on_probation:
            leased[ON_TRIAL] = "1"
        if role == SERVER:
            return server_launch(self._folder, n, self._environment | leased)
        arguments = [str(self._folder.root), role, str(n)]
        is_isolated = is_sandboxed(config, role)
        command = [sys.executable, "-m", KEEPER_MODULE if is_isolated else ACTOR_MODULE, *arguments]
        log, box = self._folder.log(child), self._folder.black_box(child)
        server = f"{SERVER}.{n}" if role == "rollout" and not is_client(child) else ""
        launch = Launch(command, log, box, self._environment | leased, secrets_of(config, [role]), awaits=server)
        if is_isolated or role not in self._forked:
            return launch if self._leases.holds(role) else replace(launch, can_start=partial(self._leases.holds, role))

        def can_start() -> bool:
            return self._leases.holds(role) and self._zygote.ready()

        return replace(launch, fork=partial(self._zygote.fork, arguments, leased), can_start=can_start)

    def _renew_leases(self) -> None:
        """Renew the leases, or end if the broker has closed the connection, as it does when credentials expire.

        The next incarnation signs in with the credentials that are then on disk.
        """
        if self._connection.nc.is_closed:
            url = self._connection.address.url
            self._status.failed(f"broker {url} has closed the connection; check whether the credentials have expired")
            os._exit(EXIT_BLAMELESS)
        self._leases.follow(self._watcher.node, self._tree.children())
        zygote = self._zygote.state() if self._forked else None
        children = self._tree.states()
        for name, state in children.items():
            if (code := self._watcher.node.code.get(name)) is not None:
                state["code_since"] = code.since
        entry: dict[str, Any] = {"pid": os.getpid(), "since": self._began, "children": children, "zygote": zygote}
        machine = self._machine.latest()
        if machine is not None:
            entry["machine"] = machine.plain()
        self._leases.renew(
            {**entry, "gpus": self._gpus.held(), "room": self._gpus.room(), "spot": self._assignment.spot}
        )
        # `relax tree` reads the lease; monitors, which may not read the bucket, get the same counts as a metric.
        zygotes = {self._zygote_name: zygote} if zygote is not None else {}
        figures = {} if machine is None else machine.figures()
        self._journal.metric({**supervision_metric({**children, **zygotes}), **figures})

    def _on_sigterm(self, *_: object) -> None:
        self._status.stop_requested()
        if self._assignment.number == 0:
            self._tree.stop()
            return
        # The run continues without this node, so its actors finish their current rows.
        if (seconds := self._assignment.drain_limit) is not None:
            self._tree.limit_stop(seconds)
        self._watcher.leave()

    def _gave_up(self, report: GiveUp) -> int:
        self._status.failed(f"{report.child}: {report.reason}")
        self._status.gave_up(self._reporter.failure or Failure(report.child, report.reason, ""))
        return EXIT_GAVE_UP


def _zygote(
    config: Config,
    folder: RunFolder,
    environment: dict[str, str],
    forked: list[str],
    on_importing: Callable[[float], None],
) -> Zygote:
    """Create the client of the zygote, without starting it; its forks share its environment."""
    return Zygote(
        folder.log("zygote"),
        folder.black_box("zygote"),
        without_secrets(os.environ, secrets_of(config, forked)) | environment,
        start_deadline=config.supervision.start_deadline,
        heartbeat=config.supervision.heartbeat,
        modules=PRELOADED if config.simulate is None else PRELOADED_SIMULATED,
        on_importing=on_importing,
    )


def _computes_as(child: str) -> str:
    """Return the actor whose GPUs a child computes on: a server has those of its rollout actor."""
    role, n = split_child_id(child)
    return f"rollout.{n}" if role == SERVER else child


def forked_roles(config: Config, roles: Collection[str]) -> list[str]:
    """Return the roles of a node whose actors the zygote forks.

    They share its secrets, and its memory counts against their limits, so that roles with other secrets or with a limit
    have processes of their own. Without a role that imports torch there is no zygote: the other imports take a second.
    """
    if config.simulate is not None:  # imports nothing slow, but there may be thousands of actors
        return list(roles)
    slow = [role for role in roles if role in ROLES.built_in and built_in_spec(role).device]
    secrets = set(secrets_of(config, slow))
    light = (role for role in roles if slow and role not in slow)
    fit = [
        r for r in light if set(secrets_of(config, [r])) == secrets and section_of(config, r).memory_limit_mib is None
    ]
    return [*slow, *fit]


def main() -> None:
    """Run a node; the process's entry point."""
    logs.configure()
    status = StatusPipe()
    try:
        code = Node(RunFolder(Path(sys.argv[1])), status).run()
    except ConfigError as error:
        status.failed(str(error))
        code = EXIT_CONFIG
    except RelaxError as error:
        traceback.print_exc()
        status.failed(str(error))
        code = EXIT_BROKER_UNREACHABLE if isinstance(error, BrokerUnreachableError) else EXIT_CRASHED
    sys.exit(code)


if __name__ == "__main__":
    main()
