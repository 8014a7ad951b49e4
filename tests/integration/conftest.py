"""Surroundings of one actor on the real server, for tests that call a role without its process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from broker.leases import RunState
from broker.store import Store
from broker.streams import ensure_bucket
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.data.model_folder import prepare
from relax_actors.roles.trainer import Trainer
from relax_actors.runtime import Context
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from tests.support.running import TINY

MakeContext = Callable[..., Context]
MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_context(table: Table, tmp_path: Path) -> MakeContext:
    """Make the context of one life of an actor, from the tiny configuration and some settings."""

    def make(role: str, *settings: str, incarnation: int = 1) -> Context:
        config = load_config(TINY, [f"run.folder={tmp_path / 'run'}", "trainer.checkpoint_every=100", *settings])
        prepare(config, config.model_path)
        author = f"{role}.0#{incarnation}"
        return Context(
            config=config,
            folder=RunFolder(tmp_path / "run"),
            role=role,
            n=0,
            incarnation=incarnation,
            table=Table(table.connection, table.subjects, Store(tmp_path / "store"), author),
            state=RunState(
                table.connection, table.connection.call(ensure_bucket(table.connection, table.subjects), 20)
            ),
            journal=Journal(table.connection, table.subjects, role, 0),
        )

    return make


@pytest.fixture
def make_trainer(table: Table, make_context: MakeContext) -> MakeTrainer:
    """Make one life of the trainer, which has read what the table holds."""

    def make(*settings: str, incarnation: int = 1) -> Trainer:
        trainer = Trainer()
        trainer.context = make_context("trainer", *settings, incarnation=incarnation)
        trainer.setup()
        trainer.recover(table.snapshot(trainer.follows()))
        return trainer

    return make
