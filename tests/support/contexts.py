"""The surroundings of one actor on the real server, for tests that call a role without its process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from broker.connection import Connection
from broker.leases import RunState
from broker.store import Store
from broker.streams import ensure_bucket, ensure_consumer
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.data.model_folder import prepare
from relax_actors.roles.trainer import Trainer
from relax_actors.runtime import Context, Role
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.streams import consumers_of
from tests.support.running import TINY

MakeTable = Callable[[Connection], Table]
MakeContext = Callable[..., Context]
MakeTrainer = Callable[..., Trainer]


def create_consumer(context: Context, role: Role) -> None:
    """Create the consumers of a role, which the owner of a run does before actors start."""
    table = context.table
    section = context.config.run.model_copy(update={"name": table.subjects.run})
    config = context.config.model_copy(update={"run": section})
    for consumer in consumers_of(config, context.role, role):
        table.connection.call(ensure_consumer(table.connection, table.subjects.table_stream, consumer), 20)


def context_of(
    table: Table, folder: Path, role: str, settings: tuple[str, ...], incarnation: int, config_file: Path = TINY
) -> Context:
    """Build the context of one incarnation of an actor, from the tiny configuration and some settings."""
    own = [f"run.name={table.subjects.run}", f"run.folder={folder / 'run'}"]
    config = load_config(config_file, [*own, "trainer.checkpoint_every=100", *settings])
    prepare(config, config.model_path)
    return Context(
        config=config,
        folder=RunFolder(folder / "run"),
        role=role,
        n=0,
        incarnation=incarnation,
        table=Table(table.connection, table.subjects, Store(folder / "store"), f"{role}.0#{incarnation}"),
        state=RunState(table.connection, table.connection.call(ensure_bucket(table.connection, table.subjects), 20)),
        journal=Journal(table.connection, table.subjects, role, 0),
        node_folder=folder / "run",
    )
