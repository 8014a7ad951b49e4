"""The recorded run of `relax console --demo`, which is shown like any run that is over.

The archive holds settings, record, evaluations and the broker's streams of a run of `examples/demo`, and no keys: it is
unpacked with new ones. `docs/make_console_demo.py` writes it.
"""

from __future__ import annotations

import json
import lzma
import tarfile
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from broker.address import Address
from broker.connection import Connection
from broker.credentials import OperatorKeys
from broker.leases import RunState
from broker.permissions import OBSERVER, Permissions
from broker.server import Server
from broker.server_keys import Users, secret_of, write_keys
from broker.streams import ensure_bucket
from broker.subjects import Subjects
from relax_actors.errors import ConfigError
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.streams import RUN_KEY, RunRecord

ARCHIVE = Path(__file__).parent / "demo.tar.xz"
NAME = "demo"
STREAMS = "streams"
"""Folder of the broker's streams in the archive; in a run's folder it is below the account that owns them."""


def streams_of(folder: RunFolder) -> Path:
    """Return the folder in which the embedded broker of a run keeps its streams; its keys must exist."""
    owner = OperatorKeys.load(secret_of(folder.broker / "keys"), "unpack the run again")
    account: str = owner.account_of(folder.load_settings().run.name).public
    return folder.broker / "store" / "jetstream" / account / STREAMS


def unpack(parent: Path, archive: Path = ARCHIVE) -> Path:
    """Unpack a recorded run into a folder of `parent`, and return it; raises ConfigError if that is not possible."""
    folder = RunFolder(parent / NAME)
    try:
        with tarfile.open(archive, "r:xz") as file:
            file.extractall(folder.root, filter="data")
        body = json.loads(folder.config.read_text())
        body["config"]["run"]["folder"] = str(folder.root)
        folder.config.write_text(json.dumps(body))
    except (OSError, lzma.LZMAError, tarfile.TarError, ValueError, KeyError) as error:
        msg = f"the recorded run {archive} cannot be unpacked into {parent}: {error}; free space, or set TMPDIR"
        raise ConfigError(msg) from error
    run = folder.load_settings().run.name
    operator = Users.operator(run)
    # Readers look whether the run is up as an observer; the broker of a run that is over admits its operator only.
    write_keys(folder.broker / "keys", Users(run, {**operator.granted, OBSERVER: Permissions((), ())}))
    own = streams_of(folder)
    own.parent.mkdir(parents=True)
    (folder.root / STREAMS).rename(own)
    server = Server(folder.broker, users=operator)
    try:
        with closing(Connection(server.start(), "recording")) as connection:
            # Leases, counters and the published run are not part of the archive.
            state = RunState(connection, connection.call(ensure_bucket(connection, Subjects(run)), 30))
            record = asdict(RunRecord(body["config"], "", finished=True))
            connection.call(state.update(RUN_KEY, lambda _: record), 30)
        Address.load(folder.broker / "address.json").save(folder.address)
    finally:
        server.stop()
    return folder.root
