"""Node on another machine: reads the run from the broker and supervises its share of the actors.

A node owns only its actors; admission and the ledger belong to PromptSource, the end of the run to `relax up`. A node
may join and leave at any time: its number is a lease, its rows go to others when it leaves, and it ends with the run.
"""

from __future__ import annotations

import random
import re
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import nats.errors
import structlog
from nats.js.errors import NotFoundError

from broker.address import Address
from broker.connection import Connection
from broker.leases import RunState
from broker.permissions import NODE
from broker.streams import CONSUMER_SECONDS, open_bucket
from broker.subjects import Subjects
from relax_actors.config import Config, apply_settings, make_importable
from relax_actors.devices.inventory import NO_REQUEST, GpuRequest
from relax_actors.errors import ConfigError, RelaxError
from relax_actors.isolation.janitor import Janitor
from relax_actors.operations.plan import MOST_NODES
from relax_actors.roles import section_of
from relax_actors.runtime.code_version import source_version
from relax_actors.runtime.logs import maintain_root_files
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.assignment import Assignment, check_spot, parse, where
from relax_actors.supervision.desired import needs_restart, with_operations
from relax_actors.supervision.gpu_leases import check_gpus
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.lean_process import lean_command
from relax_actors.supervision.ownership import OWNER_SECONDS, is_of, is_taken
from relax_actors.supervision.pools import make_pool, secrets_of
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.root_status import RootStatusPublisher
from relax_actors.supervision.spec import ChildSpec
from relax_actors.supervision.streams import RunRecord, fetch_run_record, store_mark
from relax_actors.supervision.supervision_log import SupervisionLog
from relax_actors.supervision.supervisor import GiveUp, Supervisor

log = structlog.get_logger()
POLL_SECONDS = 1.0
CLAIM_SECONDS = 20.0
STORE_SECONDS = 10.0
END_SECONDS = 5.0
"""Seconds for the node's process to end after its actors."""
GRACE_REST, GRACE_SHARE = 1.0, 0.75
"""Seconds of a node's grace that are left when its process is killed; at least this share of the grace is before."""


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What a node is asked to be.

    Attributes:
        run: name of the run.
        name: name of the node, unique within the run.
        roles: `role` or `role=number` each.
        store: the run's store, as mounted here.
        folder: the run's folder, as mounted here.
        work_folder: folder of this node alone.
        import_path: folder in which dotted paths are imported; None for the run's own.
        settings: settings that differ on this machine, `key=value` each.
        gpus: GPUs of this machine that the node may use.
        spot: whether the machine may vanish at any instant; see `Assignment`.
        grace: seconds that the node has to leave in; None for the deadlines of its roles.
        wait_for_restart: wait for the run to continue when it is over; otherwise leave.
    """

    run: str
    name: str
    roles: list[str]
    store: Path
    folder: Path
    work_folder: Path
    import_path: Path | None = None
    settings: tuple[str, ...] = ()
    wait_for_restart: bool = False
    gpus: GpuRequest = NO_REQUEST
    spot: bool = False
    grace: float | None = None


class RemoteNode:
    """One node, from joining to leaving. Create and run it in a thread that lives as long as the node."""

    def __init__(self, address: Address, wanted: NodeRequest) -> None:
        self.address, self.wanted = address, wanted
        self.folder = RunFolder(wanted.work_folder)
        self._lock = self.folder.lock()
        self._halt = threading.Event()
        self._tree: ProcessTree | None = None
        self._has_joined = False
        self._asked: Assignment
        """What the node was started with, before operations."""
        self._janitor: Janitor
        self._connection = Connection(address.for_user(NODE), f"node {wanted.name}", deadline=30.0)

    def stop(self) -> None:
        """Leave the run after the actors have finished their rows; callable from any thread and signal handlers."""
        self._halt.set()
        if self._tree is not None:
            self._tree.stop()

    def run(self) -> GiveUp | None:
        """Join the run until it is over or `stop` is called; return the report if a supervisor gave up.

        Raises:
            ConfigError: the run has no such role, or the store is not the run's.
        """
        self._janitor = Janitor()
        try:
            while (record := self._await_run()) is not None:
                report = self._run_node(record)
                self._has_joined = True
                if report is not None:
                    return report
            return None
        finally:
            self._janitor.close()
            self._connection.close()
            self._lock.close()

    def _state(self) -> RunState:
        bucket = open_bucket(self._connection, Subjects(self.wanted.run))
        return RunState(self._connection, self._connection.call(bucket, CONSUMER_SECONDS + 1))

    def _reconnect(self) -> RunState | None:
        """Sign in again if the broker has closed the connection; return the run's state, or None if it stays as it is.

        The broker closes the connection when credentials expire; the file may hold newer ones by now.
        """
        if not self._connection.nc.is_closed:
            return None
        try:
            connection = Connection(self.address.for_user(NODE), f"node {self.wanted.name}", deadline=30.0)
        except RelaxError as error:
            log.warning("not_signed_in", error=str(error))
            return None
        self._connection.close()
        self._connection = connection
        return self._state()

    def _await_run(self) -> RunRecord | None:
        """Wait for a run that is not over; None if this node is to leave."""
        waited, subjects = 0, Subjects(self.wanted.run)
        while not self._halt.is_set():
            if self._connection.call(_bucket_exists(self._connection, subjects), 60):
                record = self._connection.call(fetch_run_record(self._state()), 60)
                if record is not None and not record.finished:
                    return record
                # The run may be about to continue with more steps or other settings.
                over = self._has_joined or waited * POLL_SECONDS > CLAIM_SECONDS
                if record is not None and over and not self.wanted.wait_for_restart:
                    log.info("run_is_over", run=self.wanted.run)
                    return None
            if waited % 10 == 0:
                log.info("waiting_for_run", run=self.wanted.run, broker=self.address.url)
            waited += 1
            self.folder.touch_lock()
            self._halt.wait(POLL_SECONDS)
        return None

    def _run_node(self, record: RunRecord) -> GiveUp | None:
        """Run the node's process until the run is over or its settings change."""
        state, config = self._state(), self._config(record)
        node = self._join(state, config, record)
        observer, periodic = SupervisionLog(), partial(maintain_root_files, self.folder)
        pools = {"node": _supervisor(config, node)}
        launch = partial(self._launch, config, node)
        self._tree = tree = ProcessTree(pools, launch, observer, config.supervision.heartbeat, periodic)
        tree.is_spared = self._janitor.is_foreign
        if self._halt.is_set():
            return None
        address, over = self.address.for_user(NODE), threading.Event()
        observer.status_publisher = publisher = RootStatusPublisher(address, config, tree.states, node.number)
        publisher.start()
        watch = (state, record, node, tree, over)
        watching = threading.Thread(target=self._watch, args=watch, name="watching", daemon=True)
        watching.start()
        try:
            return tree.run()
        finally:
            over.set()
            publisher.close()
            watching.join(5)
            log.info("left", run=self.wanted.run, node=node.number)

    def _join(self, state: RunState, config: Config, record: RunRecord) -> Assignment:
        """Check code and store, claim a number, and write the node's folder."""
        self._check_code(record)
        self._check_store(record)
        wanted, number = self.wanted, self._claim(state, config)
        path = str(wanted.import_path.resolve()) if wanted.import_path is not None else record.import_path
        make_importable(Path(path))
        asked = parse(config, number, wanted.name, wanted.roles)
        self._asked = replace(asked, where=where(self.folder), gpus=wanted.gpus, spot=wanted.spot, grace=wanted.grace)
        node = with_operations(self._asked, config, record)
        if node.spot:
            check_spot(config, node)
        check_gpus(config, node, CLAIM_SECONDS)
        self.folder.save_config(config, path)
        self.address.save(self.folder.address)
        node.save(self.folder)
        for role in self._asked.roles.keys() - node.roles.keys():
            log.warning("role_was_moved", role=role, node=record.moved[role] or "none of those that joined")
        log.info("joined", run=wanted.run, node=number, name=wanted.name, roles=" ".join(wanted.roles))
        return node

    def _check_code(self, record: RunRecord) -> None:
        """Check that this machine has the code that the run was started with.

        Raises:
            ConfigError: it has not.
        """
        if record.code != (own := source_version()):
            msg = (
                f"this machine has other code (relax-actors {own}) than run {self.wanted.run} was started with "
                f"({record.code or 'unknown'}); install the same version on all machines, then `relax up` and "
                "`relax node` again"
            )
            raise ConfigError(msg)

    def _check_store(self, record: RunRecord) -> None:
        """Check that the store is the run's, and not another folder at the same path.

        Raises:
            ConfigError: it is not.
        """
        end = time.monotonic() + STORE_SECONDS
        while (mark := store_mark(self.wanted.store, make=False)) != record.mark and not self._halt.is_set():
            if time.monotonic() > end:
                what = "is another run's" if mark else "has no file 'mark' of the run's"
                msg = (
                    f"{self.wanted.store.resolve()} is not the store of run {self.wanted.run}: it {what}; "
                    "mount the run's store there, or set --store"
                )
                raise ConfigError(msg)
            # On a network file system a new file may be visible only after a while.
            self._halt.wait(POLL_SECONDS)

    def _launch(self, config: Config, node: Assignment, _child: str) -> Launch:
        command = lean_command("relax_actors.supervision.node", str(self.folder.root))
        log, box = self.folder.log("node"), self.folder.black_box("node")
        return Launch(command, log, box, self._janitor.environment, secrets_of(config, node.roles))

    def _config(self, record: RunRecord) -> Config:
        """Return the run's settings, with those that differ on this machine."""
        body: dict[str, Any] = record.config | {}
        body["run"] = {**body["run"], "folder": str(self.wanted.folder.resolve())}
        body["store"] = {**body["store"], "path": str(self.wanted.store.resolve())}
        # The broker's address is taken from the folder, not from the published settings.
        body["broker"] = {**body["broker"], "url": self.address.url}
        return apply_settings(body, list(self.wanted.settings), f"run {self.wanted.run}")

    def _claim(self, state: RunState, config: Config) -> int:
        """Claim a node number: the one of the previous incarnation, or the lowest free one.

        Raises:
            ConfigError: a live node has the same name, or the run has too many nodes.
        """
        ttl = max(CLAIM_SECONDS, config.supervision.heartbeat)
        here = where(self.folder)
        body = {"name": self.wanted.name, "where": here, "since": time.time()}
        end = time.monotonic() + ttl + OWNER_SECONDS
        while True:
            leases = self._connection.call(state.leases(), 30)
            held = {int(key[5:]): value for key, value in leases.items() if re.fullmatch(r"node\.\d+", key)}
            named = {n: lease for n, lease in held.items() if n > 0 and lease.get("name") == self.wanted.name}
            own = [n for n, lease in named.items() if is_of(lease, self.wanted.name, here)]
            if own:
                # Renew the lease now: it could expire and be claimed before the node's process renews it.
                self._connection.call(state.renew_lease("node", own[0], body, ttl), 30)
                return own[0]
            if not named or self._halt.is_set():
                break
            if time.monotonic() > end:
                msg = (
                    f"run {self.wanted.run} has a node named {self.wanted.name!r}, number {min(named)}; "
                    "choose another name with --name"
                )
                raise ConfigError(msg)
            # The lease of a dead node expires after some seconds.
            self._halt.wait(POLL_SECONDS)
        for number in range(1, MOST_NODES):
            if number not in held and self._connection.call(state.acquire_lease("node", number, body, ttl), 30):
                return number
        msg = f"run {self.wanted.run} has {MOST_NODES} nodes already"
        raise ConfigError(msg)

    def _watch(
        self, state: RunState, known: RunRecord, node: Assignment, tree: ProcessTree, over: threading.Event
    ) -> None:
        """Follow the published run: stop the node's process when the run is over, its settings change or the number is
        lost; pass on the number of actors per role.
        """
        while not over.wait(POLL_SECONDS):
            try:
                record = self._connection.call(fetch_run_record(state), 10)
                taken = self._connection.call(is_taken(state, node), 10)
            except (RelaxError, nats.errors.Error) as error:
                log.debug("run_not_read", error=str(error))
                state = self._reconnect() or state
                continue
            if taken:
                log.warning("number_is_taken", node=node.number, name=node.name)
                tree.stop()
                return
            if record is None:
                continue
            if needs_restart(record, known, node):
                tree.stop()
                return
            changed = with_operations(self._asked, self._config(record), record)
            if changed != node:
                node = changed
                node.save(self.folder)


def _supervisor(config: Config, node: Assignment) -> Supervisor:
    """Supervisor of the node's process, which may take as long to stop as its slowest role."""
    settings = config.supervision
    drain = max([section_of(config, role).deadline for role in node.roles] or [0.0]) + settings.shutdown + END_SECONDS
    if node.grace is not None:
        drain = min(drain, max(node.grace - GRACE_REST, GRACE_SHARE * node.grace))
    specs = [ChildSpec("node", shutdown=drain, start_deadline=settings.start_deadline)]
    return make_pool(config, specs, random.Random(0))  # noqa: S311 jitter


async def _bucket_exists(connection: Connection, subjects: Subjects) -> bool:
    """Whether the run's bucket exists."""

    async def exists() -> bool:
        try:
            await connection.js.stream_info(f"KV_{subjects.state_bucket}")
        except NotFoundError:
            return False
        return True

    return await connection.retry(exists, f"look for run {subjects.run}", 30)
