"""Root of a run: starts the embedded broker and the node's supervisor, and keeps them running until the end."""

from __future__ import annotations

import json
import random
import signal
import traceback
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import nats.errors
import structlog

from broker.address import Address, address_of
from broker.connection import Connection
from broker.leases import RunState
from broker.permissions import OPERATOR
from broker.server import Server, ServerSettings, go_settings, is_listening
from broker.server_keys import Users
from relax_actors.config import Config, validate
from relax_actors.data.model_folder import prepare
from relax_actors.devices.inventory import NO_REQUEST, GpuRequest
from relax_actors.errors import AddressError, BrokerError, BrokerUnreachableError, ConfigError
from relax_actors.isolation.janitor import Janitor
from relax_actors.record.position import RECORDER
from relax_actors.roles import role_names
from relax_actors.roles.permissions import permissions, users
from relax_actors.runtime.logs import maintain_root_files, rotate
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.runtime.user_code import code_files, keep_code
from relax_actors.supervision.assignment import whole
from relax_actors.supervision.broker_health import BrokerHealth
from relax_actors.supervision.discard import discard, finish_discarding, has_trained
from relax_actors.supervision.gpu_leases import check_gpus
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.lean_process import lean_command
from relax_actors.supervision.lost_rows import lost_rows_of
from relax_actors.supervision.operation_times import OperationTimes
from relax_actors.supervision.operations import operations_of
from relax_actors.supervision.pools import children_of, observers_of, secrets_of
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.resume import MAY_CHANGE, Effect, absolute, compare, listed, needs_new_start
from relax_actors.supervision.root_status import RootStatusPublisher
from relax_actors.supervision.spec import Backoff, ChildSpec, Failure, Limits
from relax_actors.supervision.streams import ensure_run_streams, publish_run
from relax_actors.supervision.supervision_log import SupervisionLog
from relax_actors.supervision.supervisor import Phase, Supervisor

log = structlog.get_logger()
REACH_SECONDS = 5.0
REPAIR_SECONDS, OPERATION_SECONDS = 1.0, 0.2
"""Seconds between two looks at lost rows, and at operations."""
GPU_SECONDS = 15.0
"""Seconds to wait for GPUs that ending processes of an earlier start still use."""
STOPPING = "actors finish what they do and stop; a second Ctrl-C ends them at once"


class Root:
    """One run on one machine. Create and run it in a thread that lives as long as the run.

    Args:
        config: the run's configuration.
        import_path: folder in which dotted paths are imported.
        roles: roles whose actors run here; None for all, otherwise `relax node` provides the others.
        gpus: GPUs of this machine that they may use; all by default.
        fresh: remove the run that the folder holds.

    Attributes:
        actors: names of the actors that are started here.
        notes: what the start did to an earlier run in the folder, a line each.

    Raises:
        ConfigError: the folder is in use, holds a run with other settings, or the broker cannot be used.
    """

    def __init__(
        self,
        config: Config,
        import_path: str,
        roles: list[str] | None = None,
        *,
        gpus: GpuRequest = NO_REQUEST,
        fresh: bool = False,
    ) -> None:
        self.config = config = absolute(config)
        self.import_path = import_path
        self._node = node = replace(whole(config, roles), gpus=gpus)
        self.actors = children_of(config, node)
        self.folder = RunFolder(config.folder)
        self.notes: list[str] = []
        self._lock = self.folder.lock()
        self._server: Server | None = None
        self._janitor: Janitor
        self._refused: Failure | None = None
        self._waiting = ""
        self._stopping = self._has_opened = False
        try:
            self._settle_earlier_run(fresh=fresh)
            check_gpus(config, node, GPU_SECONDS)
            self.address = self._prepare_broker()
            prepare(config, config.model_path)
            self.folder.save_config(config, import_path)
            replace(node, kept=self._keep_code()).save(self.folder)
            self.folder.report.unlink(missing_ok=True)
        except BaseException:
            self._lock.close()
            raise
        self._observer = SupervisionLog()
        # Pools stop in reverse order: the recorder reads what has ended while the broker is still there.
        pools = {"run": self._supervisor(), **observers_of(config)}
        periodic = partial(maintain_root_files, self.folder)
        self.tree = ProcessTree(pools, self._launch, self._observer, config.supervision.heartbeat, periodic)

    def _settle_earlier_run(self, *, fresh: bool) -> None:
        """Resume the run in the folder with these settings, or remove it; see `supervision/resume.py`.

        Raises:
            ConfigError: it has trained with other settings, or it cannot be removed.
        """
        folder = self.folder
        try:
            finish_discarding(folder)
            if fresh:
                discard(folder)
            elif (saved := folder.saved_config()) is not None:
                self._compare(validate(saved["config"], str(folder.config)))
        except BrokerError as error:
            raise ConfigError(str(error)) from error

    def _compare(self, old: Config) -> None:
        """Accept changed settings, or start from nothing if no step was trained with the saved ones.

        Raises:
            ConfigError: a step was trained, and a setting differs that must stay.
        """
        changes = compare(old, self.config)
        run, root = self.config.run.name, self.folder.root
        if needs_new_start(changes) and not has_trained(self.folder, old):
            discard(self.folder)
            text = f"run {run} has trained no step yet: it starts from nothing with the new settings\n{listed(changes)}"
            self.notes.append(text)
            return
        if refused := [change for change in changes if change.effect is Effect.REFUSED]:
            removed = "this run" if self.config.run.stage is None else "the runs of all stages"
            msg = (
                f"run folder {root} holds a run with other settings:\n{listed(refused)}\nRestore them, set another "
                f"run.name, or start from nothing with --fresh, which removes {removed}. A run that has trained can be "
                f"resumed with changes of: {MAY_CHANGE}"
            )
            raise ConfigError(msg)
        if others := [change for change in changes if change.key != "run.folder"]:
            self.notes.append(f"run {run} resumes with changed settings\n{listed(others)}")

    def _prepare_broker(self) -> Address:
        broker = self.config.broker
        if broker.url is None:
            limits = ServerSettings(
                port=broker.port,
                max_store=broker.max_bytes + broker.log_bytes + (1 << 30),
                sync_interval=broker.sync_interval,
                websocket=broker.websocket,
                origins=tuple(broker.origins),
            )
            self._server = Server(self.folder.broker, limits, self._users())
            try:
                address = self._server.prepare()
            except BrokerError as error:
                raise ConfigError(str(error)) from error
        else:
            try:
                address = address_of(broker.url, broker.credentials, broker.ca)
                self._make_streams(address.for_user(OPERATOR))
            except BrokerError as error:
                raise ConfigError(str(error)) from error
        address.save(self.folder.address)
        return address

    def _keep_code(self) -> dict[str, str]:
        """Copy the user's code, so that actors can get it back; return the version of each role that runs some."""
        kept = {}
        for role in role_names(self.config):
            with suppress(ConfigError):  # the role's code then cannot be replaced while the run is up
                kept[role] = keep_code(self.config.store_path, code_files(self.config, role, Path(self.import_path)))
        return {role: version for role, version in kept.items() if version}

    def _users(self) -> Users:
        return Users(self.config.run.name, {user: permissions(self.config, user) for user in users(self.config)})

    def open_roles(self, connection: Connection, config: Config) -> None:
        """Make streams, consumers and credentials of the roles of a configuration, and publish it.

        Raises:
            ConfigError: an external broker has no credentials of a role.
            BrokerError: the broker does not accept the credentials of a role yet.
        """
        before = self.config
        self.config = before.model_copy(update={"roles": dict(config.roles)})
        if self._server is not None:
            self._server.set_users(self._users())
            self.tree.kill("broker", signal.SIGHUP)  # it reads its accounts again
        try:
            for name in [name for name, section in config.roles.items() if before.roles.get(name) != section]:
                Connection(self.address.for_user(name), "root", REACH_SECONDS).close()
        except BrokerError as error:
            self.config = before
            if isinstance(error, AddressError):
                msg = f"{error}, and have the server reload its configuration"
                raise ConfigError(msg) from error
            raise
        self._open_run(connection)

    def _make_streams(self, address: Address) -> None:
        """Create the streams and the bucket on an external broker, where the other users may not."""
        connection = Connection(address, "root", REACH_SECONDS)
        try:
            self._open_run(connection)
        finally:
            connection.close()

    def _open_run(self, connection: Connection) -> RunState:
        state = connection.call(ensure_run_streams(connection, self.config), 60)
        connection.call(publish_run(state, self.config, self.import_path, starts=not self._has_opened), 30)
        self._has_opened = True
        return state

    def _prepare_run(self, connection: Connection) -> RunState:
        """Open the run on the embedded broker, and end it if that is impossible; called in the publisher's thread.

        Raises:
            BrokerError: it could not be opened.
        """
        try:
            return self._open_run(connection)
        except (BrokerUnreachableError, nats.errors.Error):
            raise  # the publisher tries again
        except BrokerError as error:
            self._refuse(Failure("broker", str(error), ""))
            raise
        except Exception as error:  # of the store, or of a user's role
            plain = isinstance(error, ConfigError)
            reason = str(error) if plain else f"{type(error).__name__}: {error}"
            self._refuse(Failure("root", reason, "" if plain else traceback.format_exc()))
            msg = f"the run could not be opened: {reason}"
            raise BrokerError(msg) from error

    def _refuse(self, failure: Failure) -> None:
        """End the run with its first failure; called in the publisher's thread."""
        self._refused = self._refused or failure
        log.error("refused", child=failure.role, reason=failure.reason)
        self.tree.stop()

    def _supervisor(self) -> Supervisor:
        settings = self.config.supervision
        specs = [
            ChildSpec(
                "node", shutdown=len(self.actors) * (settings.shutdown + 1), start_deadline=settings.start_deadline
            )
        ]
        if self._server is not None:
            specs.insert(0, ChildSpec("broker", shutdown=10, start_deadline=settings.start_deadline))
        limits = Limits(settings.intensity, settings.period)
        backoff = Backoff(settings.backoff, settings.backoff_max)
        return Supervisor(specs, limits, backoff, random.Random(0))  # noqa: S311 jitter

    def _is_node_ready(self) -> bool:
        """Whether the node is ready: until then an observer would find no streams, and delay the start."""
        return self.tree.pools["run"].children["node"].phase is Phase.READY

    def _launch(self, child: str) -> Launch:
        if child == "broker" and self._server is not None:
            rotate(self._server.log)
            health = BrokerHealth(
                self._server,
                self.address.for_user(OPERATOR),
                self.config.supervision.heartbeat,
                self.config.store.patience,
                self._notice,
            )
            probe = partial(is_listening, self.address)
            environment = {**self._janitor.environment, **go_settings()}
            return Launch(self._server.command, self._server.log, None, environment, probe=probe, health_check=health)
        if child == RECORDER:
            command = lean_command("relax_actors.supervision.recorder", str(self.folder.root))
            environment = self._janitor.environment
            can_start = self._is_node_ready
            return Launch(command, self.folder.log(child), None, environment, can_start=can_start, hold_stop=True)
        command = lean_command("relax_actors.supervision.node", str(self.folder.root))
        log, box = self.folder.log("node"), self.folder.black_box("node")
        return Launch(command, log, box, self._janitor.environment, secrets_of(self.config, self._node.roles))

    def _notice(self, text: str) -> None:
        if text and not self._waiting:
            log.warning("waiting", what=text)
        self._waiting = text

    @property
    def notice(self) -> str:
        """What the whole run waits for; empty if nothing."""
        return STOPPING if self._stopping else self._waiting

    def stop(self) -> None:
        """Stop the run in order; callable from a signal handler."""
        self._stopping = True
        self.tree.stop()

    def run(self) -> Failure | None:
        """Keep the run up until `tree.stop()`; return the failure if a supervisor gave up."""
        # An embedded broker starts only now, as a child.
        prepare = None if self._server is None else self._prepare_run
        self._observer.status_publisher = status_publisher = RootStatusPublisher(
            self.address.for_user(OPERATOR),
            self.config,
            self.tree.states,
            prepare=prepare,
            tasks={
                partial(lost_rows_of, lambda: self.config): REPAIR_SECONDS,
                partial(operations_of, self, self.folder, OperationTimes()): OPERATION_SECONDS,
            },
        )
        status_publisher.start()
        self._janitor = janitor = Janitor()
        self.tree.is_spared = janitor.is_foreign
        try:
            report = self.tree.run()
        finally:
            janitor.close()
            status_publisher.close()
            self._lock.close()
        if self._refused is not None:
            return self._refused
        if report is None:
            return None
        if self._observer.failure is not None:
            return self._observer.failure
        if self.folder.report.exists():
            body = json.loads(self.folder.report.read_text())
            return Failure(body["child"], body["reason"], body["traceback"])
        return Failure(report.child, report.reason, f"see {self.folder.log(report.child)}")
