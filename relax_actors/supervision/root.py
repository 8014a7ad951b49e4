"""The root of a run: the broker, if it is ours, and the node's supervisor, kept up until the run is finished."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import structlog

from broker.address import Address
from broker.connection import Connection
from broker.server import Server, ServerSettings, is_listening
from relax_actors.config import Config
from relax_actors.data.model_folder import prepare
from relax_actors.errors import BrokerError, ConfigError
from relax_actors.roles.permissions import OPERATOR
from relax_actors.runtime.blackbox import Reading
from relax_actors.runtime.logs import keep_root, rotate
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.assignment import whole
from relax_actors.supervision.broker_health import BrokerHealth
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.pools import children_of
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.root_status import Herald
from relax_actors.supervision.spec import Backoff, Blame, ChildSpec, Exit, Failure, Limits, Strategy
from relax_actors.supervision.streams import ensure_run_streams, publish_run
from relax_actors.supervision.supervisor import GiveUp, Supervisor

log = structlog.get_logger()
MAY_CHANGE = (
    "run.steps",
    "run.folder",
    "data.path",
    "model.path",
    "broker",
    "supervision",
    "eval",
    "prompts",
    "store.path",
)
REACH_SECONDS = 5.0


class SupervisionLog:
    """Tells the log of a root, and the run, what happens to its children; the node tells of the others."""

    def __init__(self) -> None:
        self.herald: Herald | None = None
        self.failure: Failure | None = None
        """What the node could not keep up, if it said so."""
        self._ended: dict[str, float] = {}
        self._starts: dict[str, int] = {}

    def started(self, child: str, pid: int, starts: int) -> None:
        """A child was started."""
        log.info("started", child=child, pid=pid, starts=starts)
        self._starts[child] = starts

    def ready(self, child: str, seconds: float) -> None:
        """A child is ready."""
        log.info("ready", child=child, seconds=round(seconds, 3))
        ended = self._ended.pop(child, None)
        if ended is not None and self.herald is not None:
            down = round(time.monotonic() - ended, 3)
            self.herald.event("repaired", child, seconds=down, restarts=self._starts[child] - 1)

    def ended(self, child: str, outcome: Exit, _last: Reading) -> None:
        """A child is gone."""
        if outcome.normal and outcome.blame is not Blame.OUTSIDE:
            return
        log.warning("crashed", child=child, reason=outcome.reason)
        self.failure = outcome.below or self.failure
        self._ended.setdefault(child, time.monotonic())
        if self.herald is not None:
            self.herald.event("down", child, reason=outcome.reason)

    def gave_up(self, pool: str, report: GiveUp) -> None:
        """A child cannot be kept up."""
        log.error("gave_up", pool=pool, child=report.child, reason=report.reason)


class Root:
    """One run on one machine. Make and run it in the thread that lives as long as the run.

    Args:
        config: the run's.
        import_path: folder in which dotted paths are found.
        roles: those whose actors run here; all if None, else the others come with `relax node`.
    """

    def __init__(self, config: Config, import_path: str, roles: list[str] | None = None) -> None:
        # Absolute from here on: other processes read it from other working directories.
        section = config.run.model_copy(update={"folder": config.folder.resolve()})
        self.config = config = config.model_copy(update={"run": section})
        self.import_path = import_path
        node = whole(config, roles)
        self._actors = children_of(config, node)
        self.folder = RunFolder(config.folder)
        self._lock = self.folder.lock()
        self._server: Server | None = None
        self.notice = ""
        """What the whole run waits for, if it does."""
        try:
            self._check_same_run()
            self.address = self._prepare_broker()
            prepare(config, config.model_path)
            self.folder.save_config(config, import_path)
            node.save(self.folder)
            self.folder.report.unlink(missing_ok=True)
        except BaseException:
            self._lock.close()
            raise
        self._observer = SupervisionLog()
        pools, chores = {"run": self._supervisor()}, partial(keep_root, self.folder)
        self.tree = ProcessTree(pools, self._launch, self._observer, config.supervision.heartbeat, chores)

    def _check_same_run(self) -> None:
        """See that a run that was begun in the folder has the same settings."""
        saved = self.folder.saved()
        if saved is not None:
            changed = sorted(_differences(saved["config"], self.config.model_dump(mode="json")))
            if "run.steps" in changed and self.config.trainer.schedule != "constant":
                msg = (
                    f"run.steps cannot change in run folder {self.folder.root}: trainer.schedule = "
                    f"{self.config.trainer.schedule!r} depends on it, steps could not be replayed; set another run.name"
                )
                raise ConfigError(msg)
            changed = [key for key in changed if not key.startswith(MAY_CHANGE) and not key.endswith(".replicas")]
            if changed:
                msg = (
                    f"run folder {self.folder.root} holds a run with other settings: {', '.join(changed)}; "
                    "restore them, set another run.name, or remove the folder"
                )
                raise ConfigError(msg)

    def _prepare_broker(self) -> Address:
        broker = self.config.broker
        if broker.url is None:
            limits = ServerSettings(
                port=broker.port,
                max_store=broker.max_bytes + broker.log_bytes + (1 << 30),
                sync_interval=broker.sync_interval,
            )
            self._server = Server(self.folder.broker, limits)
            try:
                address = self._server.prepare()
            except BrokerError as error:
                raise ConfigError(str(error)) from error
        else:
            address = address_of(broker.url, broker.credentials, broker.ca)
            try:
                self._make_streams(address.for_user(OPERATOR))
            except BrokerError as error:
                raise ConfigError(str(error)) from error
        address.save(self.folder.address)
        return address

    def _make_streams(self, address: Address) -> None:
        """Make what the run needs of a broker that is not ours: its other users may not."""
        connection = Connection(address, "root", REACH_SECONDS)
        try:
            state = connection.call(ensure_run_streams(connection, self.config), 60)
            connection.call(publish_run(state, self.config, self.import_path), 30)
        finally:
            connection.close()

    def _supervisor(self) -> Supervisor:
        settings = self.config.supervision
        specs = [ChildSpec("node", shutdown=len(self._actors) * (settings.shutdown + 1), start_deadline=60)]
        if self._server is not None:
            specs.insert(0, ChildSpec("broker", shutdown=10, start_deadline=60))
        limits = Limits(settings.intensity, settings.period)
        backoff = Backoff(settings.backoff, settings.backoff_max)
        return Supervisor(specs, Strategy.ONE_FOR_ONE, limits, backoff, random.Random(0))  # noqa: S311 jitter

    def _launch(self, child: str) -> Launch:
        if child == "broker" and self._server is not None:
            rotate(self._server.log)
            health = BrokerHealth(
                self._server,
                self.address,
                self.config.supervision.heartbeat,
                self.config.store.patience,
                self._notice,
            )
            probe = partial(is_listening, self.address)
            return Launch(self._server.command, self._server.log, probe=probe, examine=health)
        command = [sys.executable, "-m", "relax_actors.supervision.node", str(self.folder.root)]
        return Launch(command, self.folder.log("node"), self.folder.box("node"))

    def _notice(self, text: str) -> None:
        if text and not self.notice:
            log.warning("waiting", what=text)
        self.notice = text

    def run(self) -> Failure | None:
        """Keep the run up until `tree.stop()`; gives the reason if it could not be kept up."""
        self._observer.herald = herald = Herald(self.address.for_user(OPERATOR), self.config, self.tree.states)
        herald.start()
        try:
            report = self.tree.run()
        finally:
            herald.close()
            self._lock.close()
        if report is None:
            return None
        if self._observer.failure is not None:
            return self._observer.failure
        if self.folder.report.exists():
            body = json.loads(self.folder.report.read_text())
            return Failure(body["child"], body["reason"], body["traceback"])
        return Failure(report.child, report.reason, f"see {self.folder.log(report.child)}")


def address_of(url: str, credentials: Path | None = None, ca: Path | None = None) -> Address:
    """An address from `nats://[user:password@]host:port`; from those of a cluster's servers with commas between."""
    own, authority = (None if path is None else str(path.resolve()) for path in (credentials, ca))
    servers, account = [], ""
    for server in re.split(r",(?=\w+://)", url):
        scheme, _, rest = server.partition("://")
        known, at, host = rest.rpartition("@")
        servers.append(f"{scheme}://{host}" if at else server)
        account = known or account
    if not account:
        return Address(url, credentials=own, ca=authority)
    user, _, password = account.partition(":")
    return Address(",".join(servers), unquote(user), unquote(password), own, authority)


def _differences(old: object, new: object, at: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in {**old, **new}:
            found += _differences(old.get(key), new.get(key), f"{at}.{key}" if at else str(key))
        return found
    return [] if old == new else [at]
