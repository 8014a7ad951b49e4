"""Fixtures of all tests: one real nats-server for the session, in which each test has a run of its own."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from nats.js.errors import NotFoundError

from broker.address import Address
from broker.connection import Connection
from broker.server import Server
from broker.store import Store
from broker.streams import ensure_streams, log_spec, table_spec
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.engines.torch import architectures
from relax_actors.engines.torch.describe_model import description_of
from relax_actors.roles import table_kinds
from relax_actors.roles.trainer import Trainer
from relax_actors.runtime import Context
from tests.support.contexts import MakeContext, MakeTable, MakeTrainer, context_of
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.nodes import Node
from tests.support.programs import small_file_system
from tests.support.running import ON_POLICY, TINY, Run


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Look for no garbage while tests are collected: most of what they import stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what stays out of later garbage collections: torch and transformers have half a million objects."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("broker"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def address(server: Server) -> Address:
    return Address.load(server.folder / "address.json").for_user("operator")


@pytest.fixture
def connection(address: Address) -> Iterator[Connection]:
    connection = Connection(address, "test")
    yield connection
    connection.close()


@pytest.fixture
def subjects() -> Subjects:
    return Subjects(f"t{uuid.uuid4().hex[:12]}")


@pytest.fixture
def make_table(tmp_path: Path, subjects: Subjects, address: Address) -> Iterator[MakeTable]:
    made = False

    def make(connection: Connection) -> Table:
        nonlocal made
        made = True
        streams = [table_spec(subjects, table_kinds(), 1 << 26), log_spec(subjects, 1 << 24, 3600)]
        connection.call(ensure_streams(connection, streams), 20)
        return Table(connection, subjects, Store(tmp_path / "store"), "test.0#1")

    yield make
    if made:
        # The server reserves the space of a stream, and all tests share one server.
        with closing(Connection(address, "cleaner")) as connection:
            for stream in (subjects.table_stream, subjects.log_stream, f"KV_{subjects.state_bucket}"):
                with suppress(NotFoundError):
                    connection.call(connection.js.delete_stream(stream), 20)


@pytest.fixture
def table(connection: Connection, make_table: MakeTable) -> Table:
    return make_table(connection)


@pytest.fixture
def make_context(table: Table, tmp_path: Path) -> MakeContext:
    """Make the context of one incarnation of an actor, from the tiny configuration and some settings."""

    def make(role: str, *settings: str, incarnation: int = 1) -> Context:
        return context_of(table, tmp_path, role, settings, incarnation)

    return make


@pytest.fixture
def make_trainer(table: Table, make_context: MakeContext) -> MakeTrainer:
    """Make one incarnation of the trainer, which has read what the table holds."""

    def make(*settings: str, incarnation: int = 1) -> Trainer:
        trainer = Trainer()
        trainer.context = make_context("trainer", *settings, incarnation=incarnation)
        trainer.setup()
        trainer.recover(table.snapshot(trainer.follows(trainer.context.config)))
        return trainer

    return make


@pytest.fixture
def make_guarded(tmp_path: Path) -> Iterator[MakeGuarded]:
    """Make servers with credentials of their own, not started yet."""
    made: list[Guarded] = []

    def make(settings: list[str], config: Path = TINY) -> Guarded:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            made.append(Guarded(tmp_path / f"keys{len(made)}", probe.getsockname()[1], settings, toml=config))
        return made[-1]

    yield make
    for guarded in made:
        guarded.stop()


@pytest.fixture
def asks_transformers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask transformers about unusual models in this process; `relax check` starts one of its own for seconds."""
    monkeypatch.setattr(architectures, "describe", description_of)


settings.register_profile("relax", deadline=None)
settings.load_profile("relax")


@pytest.fixture
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a configuration makes the modules beside it importable; keep that to the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def own_working_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run the test in its own folder: runs of a configuration have their folders there."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Fingerprint at the end of the run `ON_POLICY` that nothing disturbs; one run for all workers of xdist."""
    own = tmp_path_factory.getbasetemp()
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    found = folder / "undisturbed"
    with (folder / "undisturbed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            run = Run(tmp_path_factory.mktemp("undisturbed"), "undisturbed", list(ON_POLICY))
            found.write_text(str(run.complete()["weights_fingerprint"]))
    return found.read_text()


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(name: str, *settings: str, config: Path = TINY) -> Run:
        run = Run(tmp_path, name, list(settings), config)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system."""
    folder = tmp_path / "small"
    folder.mkdir()
    with small_file_system(folder, "64m") as why:
        if why:
            pytest.skip(why)
        yield folder


@pytest.fixture
def nodes() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(*arguments: Any, **options: Any) -> Node:
        made.append(Node(*arguments, **options))
        return made[-1]

    yield make
    for node in made:
        if node.process.poll() is None:
            node.end(signal.SIGTERM)
