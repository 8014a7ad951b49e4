"""The supervisor of a machine: one pool a role, one process an actor.

Started by the run's root as `python -m relax_actors.supervision.node <run folder>`. When a pool gives up, all are
stopped, a last report is written, and the root ends the run.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import nats.errors
import structlog

from broker.connection import Address, Bridge
from broker.leases import RunState
from broker.streams import ensure_bucket
from broker.subjects import Subjects
from relax_actors.config import Config
from relax_actors.errors import BrokerUnreachableError, ConfigError, RelaxError
from relax_actors.registry.catalog import ROLES
from relax_actors.roles import built_in_spec
from relax_actors.roles.permissions import NODE
from relax_actors.runtime import logs
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.exit_codes import EXIT_AWAY, EXIT_BLAMELESS, EXIT_CONFIG, EXIT_CRASHED, EXIT_GAVE_UP
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.assignment import Assignment
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.outcome import Status
from relax_actors.supervision.ownership import Owned
from relax_actors.supervision.pools import SERVER, pools_of, server_launch, specs_of
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.reporter import Reporter, split
from relax_actors.supervision.spec import ChildSpec, Failure
from relax_actors.supervision.streams import ensure_run_streams, publish_run
from relax_actors.supervision.supervisor import GiveUp
from relax_actors.supervision.zygote import HOST, PRELOADED, PRELOADED_MODELLED
from relax_actors.supervision.zygote_client import REPLY_SECONDS, Zygote

BEAT_SECONDS = 1.0
GRACE_SECONDS = 30.0
log = structlog.get_logger()


def actor_environment(config: Config) -> dict[str, str]:
    """What the processes of actors find in their environment."""
    threads = str(config.run.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Sets and dictionaries of strings must have one order in every life: some task generators depend on it.
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


class Heart(threading.Thread):
    """Beats the node's black box while its supervisor's loop goes round; starting an actor may hold the loop up."""

    def __init__(self, box: BlackBox) -> None:
        super().__init__(name="heart", daemon=True)
        self._box = box
        self.pulse = time.monotonic
        self.tell: Callable[[], object] = lambda: None
        self.watched: Callable[[], object] = lambda: None

    def run(self) -> None:
        """Beat."""
        while True:
            if time.monotonic() - self.pulse() < REPLY_SECONDS + GRACE_SECONDS:
                self._box.beat()
                self.tell()
            self.watched()
            time.sleep(BEAT_SECONDS)


class Watched:
    """Has as many actors of each role as the run's saved configuration says, which `relax scale` changes.

    An inference server goes when its actor has: that finishes what it has in hand.

    Args:
        folder: the run's.
        seen: `folder.state_of_config()` before the configuration was loaded that the actors were started by.
        tree: runs the actors.
    """

    def __init__(self, folder: RunFolder, seen: tuple[int, ...], tree: ProcessTree) -> None:
        self._folder, self._tree = folder, tree
        self._seen = seen
        self._leaving = False
        self._servers: list[ChildSpec] | None = None
        """Those wanted, while there are others yet."""

    def __call__(self) -> None:
        """Look whether it has changed."""
        if self._servers is not None:
            self._keep_servers(self._servers)
        if self._leaving:
            return
        with suppress(OSError, RelaxError):
            changed = self._folder.state_of_config()
            if changed != self._seen:
                config = self._folder.load_config()
                node = Assignment.load(self._folder, config)
                self._resize(lambda role: specs_of(config, node, role))
                self._seen = changed

    def leave(self) -> None:
        """Have no actors from now on."""
        self._leaving = True
        self._resize(lambda _: [])

    def _resize(self, wanted: Callable[[str], list[ChildSpec]]) -> None:
        for role in self._tree.pools:
            if role == SERVER:
                self._keep_servers(wanted(role))
            else:
                self._tree.resize(role, wanted(role))

    def _keep_servers(self, wanted: list[ChildSpec]) -> None:
        """Have these servers, and those whose actors are there yet."""
        ids, actors = {spec.id for spec in wanted}, self._tree.pools["rollout"].children
        servers = list(self._tree.pools[SERVER].children.values())
        others = [state.spec for state in servers if state.spec.id not in ids]
        used = [spec for spec in others if f"rollout.{split(spec.id)[1]}" in actors]
        self._servers = wanted if others else None
        self._tree.resize(SERVER, [*wanted, *used])


def _state(bridge: Bridge, config: Config, folder: RunFolder) -> RunState:
    """The run's state; of a broker of our own all that the run needs is made here."""
    if config.broker.url is None:
        state = bridge.call(ensure_run_streams(bridge, config), 60)
        bridge.call(publish_run(state, config, folder.import_path), 30)
        return state
    bucket = bridge.call(ensure_bucket(bridge, Subjects(config.run.name), config.broker.replicas), 30)
    return RunState(bridge, bucket)


def _zygote(config: Config, folder: RunFolder, environment: dict[str, str], journal: Journal) -> Zygote:
    """The process that forks actors, not started yet."""
    return Zygote(
        folder.log("zygote"),
        folder.box("zygote"),
        os.environ | environment,
        start_deadline=config.supervision.start_deadline,
        heartbeat=config.supervision.heartbeat,
        modules=PRELOADED if config.simulate is None else PRELOADED_MODELLED,
        say=lambda seconds: journal.event("waiting_for_import", role="zygote", seconds=seconds),
    )


def _imports_slowly(role: str) -> bool:
    return role in ROLES.built_in and built_in_spec(role).device


def run(folder: RunFolder, status: Status) -> int:
    """Supervise until told to stop; gives the process's exit code."""
    seen = folder.state_of_config()
    config = folder.load_config()
    heart = Heart(BlackBox(folder.box("node")))
    heart.start()
    bridge = Bridge(Address.load(folder.address).of(NODE), "node", deadline=30.0)
    node = Assignment.load(folder, config)
    state = _state(bridge, config, folder)
    ttl = max(2.0, config.supervision.heartbeat)
    owned = Owned(bridge, state, node, ttl)
    owned.claim()
    journal = Journal(bridge, Subjects(config.run.name), "node", node.number)
    reporter, environment = Reporter(folder, bridge, state, journal), actor_environment(config)

    # Simulated engines import nothing that is slow, but there may be very many actors.
    forked = [role for role in node.roles if config.simulate is not None or _imports_slowly(role)]
    zygote = _zygote(config, folder, environment, journal)
    if forked:
        zygote.start()

    def launch(child: str) -> Launch:
        role, n = split(child)
        if role == SERVER:
            return server_launch(folder, n, environment)
        command = [sys.executable, "-m", HOST, *(arguments := [str(folder.root), role, str(n)])]
        launch = Launch(command, folder.log(child), folder.box(child), environment)
        return replace(launch, fork=partial(zygote.fork, arguments), gate=zygote.ready) if role in forked else launch

    pools = pools_of(config, node, random.Random(os.getpid()))  # noqa: S311 jitter
    for child in (child for pool in pools.values() for child in pool.children):
        reporter.inherit(child)
    tree = ProcessTree(pools, launch, reporter, config.supervision.heartbeat, zygote.look_after)
    heart.pulse, owned.lost = lambda: tree.seen, tree.stop
    began = time.time()

    def tell() -> None:
        _end_if_refused(bridge, status)
        lease = {"pid": os.getpid(), "since": began, "children": tree.states()}
        lease["zygote"] = zygote.state() if forked else None
        owned.tell(lease)

    heart.tell = tell
    heart.watched = watched = Watched(folder, seen, tree)

    def told(*_: object) -> None:
        status.told()
        if node.number == 0:
            tree.stop()
            return
        # The run goes on without this node: its actors finish what they have in hand.
        watched.leave()

    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status.ready()
    report = tree.run()
    heart.tell = lambda: None
    with suppress(RelaxError, nats.errors.Error):
        owned.drop()
    zygote.close()
    bridge.close()
    return 0 if report is None else _gave_up(report, reporter.failure, status)


def _end_if_refused(bridge: Bridge, status: Status) -> None:
    """End if the broker has ended the connection for good, as when credentials expire: the next life signs in anew."""
    if bridge.nc.is_closed:
        status.failed(f"broker {bridge.address.url} has ended the connection: are the credentials still good?")
        os._exit(EXIT_BLAMELESS)


def _gave_up(report: GiveUp, failure: Failure | None, status: Status) -> int:
    status.failed(f"{report.child}: {report.reason}")
    status.gave_up(failure or Failure(report.child, report.reason, ""))
    return EXIT_GAVE_UP


def main() -> None:
    """Entry point of the node's process."""
    logs.configure()
    status = Status()
    try:
        code = run(RunFolder(Path(sys.argv[1])), status)
    except ConfigError as error:
        status.failed(str(error))
        code = EXIT_CONFIG
    except RelaxError as error:
        traceback.print_exc()
        status.failed(str(error))
        code = EXIT_AWAY if isinstance(error, BrokerUnreachableError) else EXIT_CRASHED
    sys.exit(code)


if __name__ == "__main__":
    main()
