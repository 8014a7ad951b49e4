"""Connection to a run, live or over.

The embedded broker of a run that is not up is started for as long as the connection is open.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from nats.js.errors import NotFoundError

from broker.address import Address, address_of
from broker.connection import Connection
from broker.credentials import read_claims
from broker.files import check_private_folder
from broker.leases import RunState
from broker.permissions import OBSERVER, OPERATOR
from broker.server import Server, ServerSettings, is_listening
from broker.server_keys import Users
from broker.store import Store
from broker.streams import open_bucket
from broker.subjects import Subjects, check_name
from broker.table import Table
from relax_actors.config.saved import SavedSettings
from relax_actors.errors import ConfigError, UnsafePathError
from relax_actors.monitoring.access import Access, address_for
from relax_actors.runtime import logs
from relax_actors.runtime.run_folder import RunFolder

if TYPE_CHECKING:
    from relax_actors.config import Config

REACH_SECONDS = 5.0


class NotUpError(ConfigError):
    """A run whose embedded broker is not up."""

    def __init__(self, run: str) -> None:
        super().__init__(f"run {run} is not up; `relax up` resumes it")


@dataclass(frozen=True)
class Connected:
    """Access to a run.

    Attributes:
        folder: folder of the run.
        settings: its settings as they were saved.
        table: its table.
        state: its leases and counters.
        live: whether its broker was up before.
        load: validates the settings.
    """

    folder: RunFolder
    settings: SavedSettings
    table: Table
    state: RunState
    live: bool
    load: Callable[[], Config]

    @cached_property
    def config(self) -> Config:
        """The validated settings, loaded when they are first used."""
        return self.load()


def find(run: str) -> RunFolder:
    """Return the folder of a run, by its path or its name below `runs/`.

    Raises:
        ConfigError: no such run, or its folder is another user's, who could have any code imported from it.
    """
    for path in (Path(run), Path("runs") / run):
        if _holds_run(path):
            folder = RunFolder(path)
            try:
                check_private_folder(folder.root.resolve())
            except (UnsafePathError, OSError) as error:
                msg = f"run folder cannot be used: {error}, or run this command as the user of the run"
                raise ConfigError(msg) from error
            return folder
    msg = f"no run {run!r}: neither {run}/config.json nor runs/{run}/config.json exists; give the run's folder"
    raise ConfigError(msg)


def _holds_run(path: Path) -> bool:
    try:
        return (path / "config.json").exists()
    except PermissionError:  # a folder that only another user can enter
        return True
    except (OSError, ValueError):  # a name that no file can have
        return False


@dataclass(frozen=True, slots=True)
class Observed:
    """Connection to the broker of a run.

    Attributes:
        run: name of the run.
        connection: the connection.
        live: whether the broker was up before.
        is_over: whether a run whose own broker does not answer has ended; false if it is not known.
    """

    run: str
    connection: Connection
    live: bool
    is_over: Callable[[], bool] = lambda: False


@contextmanager
def connected(run: str, access: Access | None = None, *, copy: Path | None = None) -> Iterator[Connected]:
    """Connect to the table of a run whose folder this machine has, as its operator.

    An embedded broker that is not up is started in its own folder, or in the folder `copy`, so that the files of the
    run stay as they are.

    Raises:
        ConfigError: no such run, or its broker cannot be reached by what it recorded.
        BrokerError: the broker does not answer and is not embedded in the run.
    """
    folder, access = find(run), access or Access()
    settings = folder.load_settings()
    # The containers of a run may see its folder at another path.
    store = Store(settings.store_path if settings.store_path.exists() else folder.root / "store")
    with _reached(folder, settings, OPERATOR, access, copy) as at:
        subjects = Subjects(settings.run.name)
        if _is_external(settings, access):
            at.connection.call(require_run(at.connection, subjects), 2 * REACH_SECONDS)
        table = Table(at.connection, subjects, store, "reader", direct=settings.broker.replicas == 1)
        bucket = at.connection.call(open_bucket(at.connection, subjects, REACH_SECONDS), 30)
        yield Connected(folder, settings, table, RunState(at.connection, bucket), at.live, folder.load_config)


@contextmanager
def observed(run: str, access: Access, *, start: bool = True) -> Iterator[Observed]:
    """Connect to a run's broker as observer; with `access.broker` from any machine.

    With `start` an embedded broker that is not up is started, which keeps others from the folder of the run meanwhile.

    Raises:
        NotUpError: the broker is embedded in the run and not up, and `start` is false.
        ConfigError: no such run, or its broker cannot be reached by what it recorded.
        BrokerError: the broker does not answer and is not embedded in the run.
    """
    try:
        folder = find(run)
    except ConfigError:
        if access.broker is None:
            raise
        logs.configure(logging.WARNING)
        address = address_of(access.broker, access.credentials).for_user(OBSERVER)
        with closing(Connection(address, "reader", REACH_SECONDS)) as connection:
            yield Observed(run_of_credentials(address, run), connection, live=True)
        return
    settings = folder.load_settings()
    if (
        not start
        and not _is_external(settings, access)
        and not is_listening(address_for(folder, settings, OBSERVER, access))
    ):
        raise _in_use(settings) if not _is_unused(folder) else NotUpError(settings.run.name)
    with _reached(folder, settings, OBSERVER, access) as at:
        yield at


@contextmanager
def _reached(
    folder: RunFolder, settings: SavedSettings, user: str, access: Access, copy: Path | None = None
) -> Iterator[Observed]:
    """Connect to a run's broker; start an embedded one that is down, or its copy."""
    logs.configure(logging.WARNING)
    address = address_for(folder, settings, user, access)
    live = _is_external(settings, access) or is_listening(address)
    with ExitStack() as stack:
        if not live:
            if copy is None:
                stack.callback(_locked(folder, settings).close)
            else:
                _copy_broker(folder, settings, copy)
            limits = ServerSettings(max_store=settings.broker.max_bytes + settings.broker.log_bytes + (1 << 30))
            server = Server(copy or folder.broker, limits, Users.operator(settings.run.name))
            stack.callback(server.kill)
            address = server.start()
        connection = stack.enter_context(closing(Connection(address, "reader", REACH_SECONDS)))
        embedded = live and not _is_external(settings, access)
        yield Observed(settings.run.name, connection, live, partial(_is_unused, folder) if embedded else lambda: False)


def _copy_broker(folder: RunFolder, settings: SavedSettings, copy: Path) -> None:
    """Copy an embedded broker that stays down meanwhile; raises ConfigError if in use."""
    try:
        with (folder.root / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # The copy must not take the port of the run, so it chooses one of its own.
            shutil.copytree(folder.broker, copy, ignore=shutil.ignore_patterns("address.json", "*.log"))
    except BlockingIOError as error:
        raise _in_use(settings) from error
    except (OSError, shutil.Error) as error:
        msg = f"the broker's files in {folder.broker} cannot be copied to {copy}: {error}; free space, or set TMPDIR"
        raise ConfigError(msg) from error


def _is_unused(folder: RunFolder) -> bool:
    """Whether no process uses a run; a run that starts at this moment is not kept from it."""
    with suppress(OSError), (folder.root / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


def _locked(folder: RunFolder, settings: SavedSettings) -> IO[str]:
    """Lock a run's folder while its embedded broker is down; raises ConfigError."""
    try:
        return folder.lock()
    except ConfigError as error:
        if not isinstance(error.__cause__, BlockingIOError):
            raise
        raise _in_use(settings) from error


def _in_use(settings: SavedSettings) -> ConfigError:
    return ConfigError(
        f"run {settings.run.name} is in use, and its broker does not answer: it starts, hangs or was stopped by a "
        f"signal. `relax up` restarts a broker that is silent for {settings.supervision.heartbeat:g} s "
        "(supervision.heartbeat), unless it was stopped itself; try again then"
    )


def _is_external(settings: SavedSettings, access: Access) -> bool:
    return settings.broker.url is not None or access.broker is not None


async def require_run(connection: Connection, subjects: Subjects) -> None:
    """Raise ConfigError if the broker has no table of the run."""

    async def look() -> bool:
        with suppress(NotFoundError):
            await connection.js.stream_info(subjects.table_stream)
            return True
        return False

    if not await connection.retry(look, f"look for {subjects.table_stream}", REACH_SECONDS):
        msg = (
            f"broker {connection.address.url} has no run {subjects.run!r}; give the address of the run's broker with "
            "--broker, or start the run with `relax up`"
        )
        raise ConfigError(msg)


def locate(run: str | None, url: str | None, credentials: Path | None, ca: Path | None) -> tuple[str, Address]:
    """Return a run's name and broker address for an observer, by folder or `url`.

    `credentials` is a folder written by `relax keys` or a .creds file, and `ca` the certificate of its authority.

    Raises:
        ConfigError: neither run nor broker is given, the name of the run is unknown, or its own broker is not up.
    """
    if url is not None:
        address = address_of(url, credentials, ca).for_user(OBSERVER)
        return run_of_credentials(address, run), address
    if run is None:
        msg = "name the run or its broker: relax monitor RUN, or --broker nats://host:port"
        raise ConfigError(msg)
    folder = find(run)
    settings = folder.load_settings()
    address = address_for(folder, settings, OBSERVER, Access(credentials=credentials))
    if settings.broker.url is None and not is_listening(address):
        msg = f"run {run} is not up, so there is nothing to watch; `relax status {run}` shows its last state"
        raise ConfigError(msg)
    return settings.run.name, address


def run_of_credentials(address: Address, run: str | None) -> str:
    """Return the given name of a run, or the name in the credentials of an address.

    Raises:
        ConfigError: there is neither.
        SubjectError: the name cannot be part of a subject.
    """
    if run is None and address.credentials:
        run = read_claims(Path(address.credentials)).name.partition(".")[0]
    if run is None:
        msg = f"the run of broker {address.url} is unknown; give its name, or credentials written by `relax keys`"
        raise ConfigError(msg)
    return check_name(run, "run name")
