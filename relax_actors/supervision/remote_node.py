"""A node of a run that was started elsewhere: it learns the run from the broker, and its actors are supervised here.

Admission, the ledger and the end of the run are the roles' and `relax up`'s, wherever they are; what a node owns is its
actors. It comes and goes: its number is a lease, its rows go to others when it leaves, and it ends with the run.
"""

from __future__ import annotations

import random
import re
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import nats.errors
import structlog
from nats.js.errors import NotFoundError

from broker.connection import Address, Bridge
from broker.leases import RunState
from broker.streams import ensure_bucket
from broker.subjects import Subjects
from relax_actors.config import Config, apply_settings, make_importable
from relax_actors.errors import ConfigError, RelaxError
from relax_actors.roles import section_of
from relax_actors.roles.permissions import NODE
from relax_actors.runtime.logs import keep_root
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.assignment import Assignment, parse, where
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.ownership import OWNER_SECONDS, is_of, is_taken
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.root import SupervisionLog
from relax_actors.supervision.root_status import Herald
from relax_actors.supervision.spec import Backoff, ChildSpec, Limits, Strategy
from relax_actors.supervision.streams import Published, mark_of, published_run
from relax_actors.supervision.supervisor import GiveUp, Supervisor

log = structlog.get_logger()
MOST_NODES = 10_000
LOOK_SECONDS = 1.0
CLAIM_SECONDS = 20.0
STORE_SECONDS = 10.0
END_SECONDS = 5.0
"""For a node's process to end, when its actors have."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a node is asked to be.

    `roles` are `role=number` each; `store` is the run's store and `folder` its folder as they are seen here; `work` is
    of this node alone; `code` is where dotted paths are found, where they were for the run if None. Who `stays` waits,
    when the run is over, for it to go on.
    """

    run: str
    name: str
    roles: list[str]
    store: Path
    folder: Path
    work: Path
    code: Path | None = None
    settings: tuple[str, ...] = ()
    stays: bool = False


class Remote:
    """One node, from joining to leaving. Make and run it in the thread that lives as long as it.

    Args:
        address: the broker.
        wanted: what it is to be.
    """

    def __init__(self, address: Address, wanted: Wanted) -> None:
        self.address, self.wanted = address, wanted
        self.folder = RunFolder(wanted.work)
        self._lock = self.folder.lock()
        self._halt = threading.Event()
        self._tree: ProcessTree | None = None
        self._took_part = False
        self._bridge = Bridge(address.of(NODE), f"node {wanted.name}", deadline=30.0)

    def stop(self) -> None:
        """Leave: actors finish what they have in hand; from any thread or a signal handler."""
        self._halt.set()
        if self._tree is not None:
            self._tree.stop()

    def run(self) -> GiveUp | None:
        """Take part until the run is over or `stop`; gives the report if an actor could not be kept up.

        Raises:
            ConfigError: the run has no such role.
        """
        try:
            while (found := self._await_run()) is not None:
                report = self._take_part(found)
                self._took_part = True
                if report is not None:
                    return report
            return None
        finally:
            self._bridge.close()
            self._lock.close()

    def _state(self) -> RunState:
        subjects = Subjects(self.wanted.run)
        return RunState(self._bridge, self._bridge.call(ensure_bucket(self._bridge, subjects), 30))

    def _signed_in_again(self) -> RunState | None:
        """The run's state by a new connection, if the broker has ended the one before, as it does when credentials
        expire: those on the disk may be newer by now. None if it has not, or refuses.
        """
        if not self._bridge.nc.is_closed:
            return None
        try:
            bridge = Bridge(self.address.of(NODE), f"node {self.wanted.name}", deadline=30.0)
        except RelaxError as error:
            log.warning("not_signed_in", error=str(error))
            return None
        self._bridge.close()
        self._bridge = bridge
        return self._state()

    def _await_run(self) -> Published | None:
        """The run, once there is one that is not over; None when this node is to leave."""
        waited = 0
        subjects = Subjects(self.wanted.run)
        while not self._halt.is_set():
            if self._bridge.call(_is_made(self._bridge, subjects), 60):
                found = self._bridge.call(published_run(self._state()), 60)
                if found is not None and not found.finished:
                    return found
                # It may be about to go on with more steps, or under new settings.
                over = self._took_part or waited * LOOK_SECONDS > CLAIM_SECONDS
                if found is not None and over and not self.wanted.stays:
                    log.info("run_is_over", run=self.wanted.run)
                    return None
            if waited % 10 == 0:
                log.info("waiting_for_run", run=self.wanted.run, broker=self.address.url)
            waited += 1
            self.folder.beat()
            self._halt.wait(LOOK_SECONDS)
        return None

    def _take_part(self, found: Published) -> GiveUp | None:
        """Run the node's process until the run is over, or is another one."""
        wanted, state = self.wanted, self._state()
        config = self._config(found)
        self._check_store(found)
        number = self._claim(state, config)
        code = str(wanted.code.resolve()) if wanted.code is not None else found.import_path
        make_importable(Path(code))
        node = parse(config, number, wanted.name, wanted.roles).scaled(found.scaled.get(wanted.name, {}))
        node = replace(node, where=where(self.folder))
        self.folder.save_config(config, code)
        self.address.save(self.folder.address)
        node.save(self.folder)
        log.info("joined", run=wanted.run, node=number, name=wanted.name, roles=" ".join(wanted.roles))
        settings = config.supervision
        drain = max(section_of(config, role).deadline for role in node.roles) + settings.shutdown
        specs = [ChildSpec("node", shutdown=drain + END_SECONDS, start_deadline=60)]
        limits, backoff = Limits(settings.intensity, settings.period), Backoff(settings.backoff, settings.backoff_max)
        pool = Supervisor(specs, Strategy.ONE_FOR_ONE, limits, backoff, random.Random(0))  # noqa: S311 jitter
        observer, chores = SupervisionLog(), partial(keep_root, self.folder)
        tree = ProcessTree({"node": pool}, self._launch, observer, settings.heartbeat, chores)
        self._tree = tree
        if self._halt.is_set():
            return None
        observer.herald = herald = Herald(self.address.of(NODE), config, tree.states, number)
        herald.start()
        over = threading.Event()
        watching = threading.Thread(
            target=self._watch, args=(state, found, node, tree, over), name="watching", daemon=True
        )
        watching.start()
        try:
            return tree.run()
        finally:
            over.set()
            herald.close()
            watching.join(5)
            log.info("left", run=wanted.run, node=number)

    def _check_store(self, found: Published) -> None:
        """See that the store is the run's, and no folder that only has its path.

        Raises:
            ConfigError: it is not.
        """
        end = time.monotonic() + STORE_SECONDS
        while (mark := mark_of(self.wanted.store, make=False)) != found.mark and not self._halt.is_set():
            if time.monotonic() > end:
                what = "is another run's" if mark else "has no file 'mark' of the run's"
                msg = (
                    f"{self.wanted.store.resolve()} is not the store of run {self.wanted.run}: it {what}; "
                    "mount the run's store there, or say by --store where it is"
                )
                raise ConfigError(msg)
            # A file made elsewhere may take a while to be seen.
            self._halt.wait(LOOK_SECONDS)

    def _launch(self, _child: str) -> Launch:
        command = [sys.executable, "-m", "relax_actors.supervision.node", str(self.folder.root)]
        return Launch(command, self.folder.log("node"), self.folder.box("node"))

    def _config(self, found: Published) -> Config:
        """The run's settings with what differs on this machine."""
        body: dict[str, Any] = found.config | {}
        body["run"] = {**body["run"], "folder": str(self.wanted.folder.resolve())}
        body["store"] = {**body["store"], "path": str(self.wanted.store.resolve())}
        # What is told of the broker is not used: the address is in the folder.
        body["broker"] = {**body["broker"], "url": self.address.url}
        return apply_settings(body, list(self.wanted.settings), f"run {self.wanted.run}")

    def _claim(self, state: RunState, config: Config) -> int:
        """A number that no other node has: the one that this had in a life before, or the lowest that is free.

        Raises:
            ConfigError: a living node has the same name, or there are too many.
        """
        ttl = max(CLAIM_SECONDS, config.supervision.heartbeat)
        here = where(self.folder)
        body = {"name": self.wanted.name, "where": here, "since": time.time()}
        end = time.monotonic() + ttl + OWNER_SECONDS
        while True:
            leases = self._bridge.call(state.leases(), 30)
            held = {int(key[5:]): value for key, value in leases.items() if re.fullmatch(r"node\.\d+", key)}
            named = {n: lease for n, lease in held.items() if n > 0 and lease.get("name") == self.wanted.name}
            own = [n for n, lease in named.items() if is_of(lease, self.wanted.name, here)]
            if own:
                # Or it could end, and be another's, before the node's process renews it.
                self._bridge.call(state.renew_lease("node", own[0], body, ttl), 30)
                return own[0]
            if not named or self._halt.is_set():
                break
            if time.monotonic() > end:
                msg = (
                    f"run {self.wanted.run} has a node named {self.wanted.name!r}, number {min(named)}; "
                    "give this one another name, by --name"
                )
                raise ConfigError(msg)
            # One that died has its lease for some seconds still.
            self._halt.wait(LOOK_SECONDS)
        for number in range(1, MOST_NODES):
            if number not in held and self._bridge.call(state.claim_lease("node", number, body, ttl), 30):
                return number
        msg = f"run {self.wanted.run} has {MOST_NODES} nodes already"
        raise ConfigError(msg)

    def _watch(
        self, state: RunState, known: Published, node: Assignment, tree: ProcessTree, over: threading.Event
    ) -> None:
        """Stop the node's process when the run is over, its settings are others, or its number is another node's; tell
        it how many actors to have.
        """
        while not over.wait(LOOK_SECONDS):
            try:
                found = self._bridge.call(published_run(state), 10)
                taken = self._bridge.call(is_taken(state, node), 10)
            except (RelaxError, nats.errors.Error) as error:
                log.debug("run_not_read", error=str(error))
                state = self._signed_in_again() or state
                continue
            if taken:
                log.warning("number_is_taken", node=node.number, name=node.name)
                tree.stop()
                return
            if found is None:
                continue
            if replace(found, scaled=known.scaled) != known:
                tree.stop()
                return
            if (scaled := node.scaled(found.scaled.get(node.name, {}))) != node:
                node = scaled
                node.save(self.folder)


async def _is_made(bridge: Bridge, subjects: Subjects) -> bool:
    """Whether somebody has made the run's bucket."""

    async def look() -> bool:
        try:
            await bridge.js.stream_info(f"KV_{subjects.state_bucket}")
        except NotFoundError:
            return False
        return True

    return await bridge.persist(look, f"look for run {subjects.run}", 30)
