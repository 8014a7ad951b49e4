"""Removal of a run, so that its folder can hold a new one.

Invariant: a folder holds a run exactly as long as it has a config.json. The removal begins by renaming this file to
discarded.json and ends by removing discarded.json. The next start in the folder finishes an interrupted removal first,
so that nothing of the old run is ever part of the new one.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nats.js.errors import NotFoundError

from broker.address import Address, address_of
from broker.connection import Connection
from broker.leases import RunState
from broker.permissions import OPERATOR, bucket_stream
from broker.server import Server, ServerSettings
from broker.server_keys import Users
from broker.shared_files import FOLDER
from broker.streams import ensure_bucket
from broker.subjects import Subjects
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.runtime.row import ROW_KINDS
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.runtime.user_code import CODE
from relax_actors.supervision.streams import MARK

REACH_SECONDS = 5.0
CALL_SECONDS = 30.0
EXPIRY_SECONDS = 5.0
"""Time beyond `supervision.heartbeat` in which the leases of dead processes expire."""


def has_trained(folder: RunFolder, config: Config) -> bool:
    """Whether the run in a locked folder, whose broker is started, has trained a step; raises BrokerError."""
    if folder.last_checkpoint:
        return True
    if config.broker.url is not None:
        with _connected(_external(config.model_dump(mode="json"))) as connection:
            return _has_batch(connection, config.run.name)
    if not folder.broker.is_dir():
        return False
    limits = ServerSettings(max_store=config.broker.max_bytes + config.broker.log_bytes + (1 << 30))
    server = Server(folder.broker, limits, Users.operator(config.run.name))
    try:
        with _connected(server.start()) as connection:
            return _has_batch(connection, config.run.name)
    finally:
        server.stop()


def discard(folder: RunFolder) -> None:
    """Remove the run in a locked folder; files that the run has not written stay.

    Raises:
        ConfigError: nodes of the run are up, or its saved settings cannot be read.
        BrokerError: the run's broker does not answer; nothing was removed.
    """
    _check_unused(folder)
    _begin(folder)
    finish_discarding(folder)


def discard_all(folders: Sequence[RunFolder]) -> None:
    """Remove the runs in folders, or none of them; files that they have not written stay.

    Each run begins with the model of the one before, so the last is removed first: what a kill leaves can go on.

    Raises:
        ConfigError: a run is up, or its saved settings cannot be read.
        BrokerError: the broker of a run does not answer.
    """
    with ExitStack() as stack:
        held = [folder for folder in reversed(folders) if folder.config.exists() or folder.discarded.exists()]
        for folder in held:
            stack.enter_context(folder.lock())
        for folder in held:
            _check_unused(folder)
        for folder in held:
            _begin(folder)
        for folder in held:
            finish_discarding(folder)


def _check_unused(folder: RunFolder) -> None:
    """Check that a run can be removed, and on a broker elsewhere is up nowhere; raises ConfigError or BrokerError."""
    if folder.discarded.exists():
        _settings(folder.discarded)
    if folder.config.exists() and (config := _settings(folder.config))["broker"]["url"] is not None:
        with _connected(_external(config)) as connection:
            _require_unused(connection, config)


def _begin(folder: RunFolder) -> None:
    """Begin to remove a run; one whose removal was interrupted before is removed first."""
    if folder.config.exists():
        finish_discarding(folder)
        folder.config.rename(folder.discarded)


def finish_discarding(folder: RunFolder) -> None:
    """Finish the removal of a run that an earlier process began; raises BrokerError if its broker does not answer."""
    if not folder.discarded.exists():
        return
    config = _settings(folder.discarded)
    if config["broker"]["url"] is not None:
        with _connected(_external(config)) as connection:
            _remove_streams(connection, Subjects(config["run"]["name"]))
    if (path := config["store"]["path"]) is not None:
        _remove_store(Path(path))
    for path in folder.contents:
        _remove(path)
    folder.discarded.unlink()


def _settings(path: Path) -> dict[str, Any]:
    """Return saved settings of any version; raises ConfigError if they do not tell where the run's files are."""
    try:
        settings: dict[str, Any] = json.loads(path.read_text())["config"]
        for section, key in (("run", "name"), ("broker", "url"), ("store", "path")):
            settings[section][key]
    except (OSError, ValueError, LookupError, TypeError) as error:
        msg = (
            f"{path} cannot be read ({type(error).__name__}: {error}), so the run's broker and store are unknown; "
            f"remove the folder {path.parent} yourself, or set another run.name"
        )
        raise ConfigError(msg) from error
    return settings


def _external(config: dict[str, Any]) -> Address:
    url, *paths = (config["broker"][name] for name in ("url", "credentials", "ca"))
    return address_of(url, *(None if path is None else Path(path) for path in paths)).for_user(OPERATOR)


@contextmanager
def _connected(address: Address) -> Iterator[Connection]:
    connection = Connection(address, "root", REACH_SECONDS)
    try:
        yield connection
    finally:
        connection.close()


def _has_batch(connection: Connection, run: str) -> bool:
    subjects = Subjects(run)

    async def find() -> bool:
        wanted = subjects.numbered("batch", "*")
        try:
            info = await connection.js.stream_info(subjects.table_stream, subjects_filter=wanted)
        except NotFoundError:
            return False
        return bool(info.state.subjects)

    return connection.call(connection.retry(find, "look for trained steps"), CALL_SECONDS)


def _require_unused(connection: Connection, config: dict[str, Any]) -> None:
    """Wait until the leases of dead processes have expired; refuse if any is renewed."""
    name, url = config["run"]["name"], connection.address.url
    bucket = connection.call(ensure_bucket(connection, Subjects(name), config["broker"]["replicas"]), CALL_SECONDS)
    state = RunState(connection, bucket)
    end = time.monotonic() + config["supervision"]["heartbeat"] + EXPIRY_SECONDS
    while leases := connection.call(state.leases(), CALL_SECONDS):
        if time.monotonic() > end:
            held = ", ".join(sorted(leases))
            msg = f"run {name} is up on broker {url}: {held}. Stop its nodes first, or set another run.name"
            raise ConfigError(msg)
        time.sleep(0.2)


def _remove_streams(connection: Connection, subjects: Subjects) -> None:
    """Delete the table with its consumers, and empty the log and the bucket, which the operator may not delete."""

    async def remove() -> None:
        for stream in (subjects.log_stream, bucket_stream(subjects), subjects.table_stream):
            try:
                if stream == subjects.table_stream:
                    await connection.js.delete_stream(stream)
                else:
                    await connection.js.purge_stream(stream)
            except NotFoundError:
                continue

    connection.call(connection.retry(remove, "remove the table"), CALL_SECONDS)


def _remove_store(store: Path) -> None:
    """Remove the run's files from a store of its own; the mark, by which it is known as a store, comes last."""
    if (store / MARK).exists():
        for name in (*ROW_KINDS, FOLDER, "weights", CODE, MARK):
            _remove(store / name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
