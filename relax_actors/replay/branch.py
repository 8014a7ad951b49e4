"""A new run that continues from another run's step, with that step's rows.

Invariant: the folder of the new run appears complete or not at all. It holds a checkpoint, the rows of the step, the
batches below it, and settings; whatever comes later, `relax up` computes as in any run that it resumes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from broker.connection import Connection
from broker.errors import BrokerError
from broker.files import make_private_folder
from broker.pull import PullSubscription
from broker.server import Server, ServerSettings
from broker.server_keys import Users
from broker.store import Store
from broker.streams import wait_for_consumer
from broker.subjects import CellId, Subjects
from broker.table import CALL_DEADLINE, Table
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.isolation.janitor import Janitor
from relax_actors.messages import Batch, Checkpoint, CriticVersion, Evaluation, RowCounts, Shard, Weights
from relax_actors.replay.recording import Recording
from relax_actors.replay.settings import with_settings
from relax_actors.replay.steps import Progress, Replayer
from relax_actors.roles import make_role, role_names
from relax_actors.runtime import StatefulRole, durable_folder
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.runtime.service_role import ServiceRole
from relax_actors.supervision.resume import compare
from relax_actors.supervision.streams import ensure_run_streams

if TYPE_CHECKING:
    from broker.table import Cell

FIXED = (
    "model.architecture",
    "model.tokenizer",
    "lora",
    "trainer.prompts_per_step",
    "algorithm.rows",
    "run.rows",
    "run.epochs",
)
"""Settings that rows and checkpoint of the other run fit; a branch cannot change them."""
RESCORED = {"reward": ("reward", "advantage"), "algorithm": ("advantage",), "advantages": ("advantage",)}
"""Columns that are computed again where a setting of a section is changed."""
ROLE = "trainer.0#0"
PAGE, PATIENCE = 256, 30.0
"""Messages that are acknowledged at once, and seconds to wait for the next."""


class Branch:
    """A new run, `name` in `folder`, made from a step with changed settings.

    Raises:
        ConfigError: the step was not trained, a setting is wrong or cannot be changed, or the folder is in use.
    """

    def __init__(self, recording: Recording, folder: Path, name: str, step: int, settings: list[str]) -> None:
        self._recording, self._folder, self._step = recording, RunFolder(folder), step
        self._batch = recording.batch(step)
        local = {"url": None, "credentials": None, "ca": None, "published": None, "port": 0}
        run = {"name": name, "folder": str(self._folder.root), "stage": None}
        self.config = with_settings(
            recording.config, settings, f"branch {name}", run=run, store={"path": None}, broker=local
        )
        self._changed = {change.key for change in compare(recording.config, self.config)}
        self._check()

    def _check(self) -> None:
        if self._folder.config.exists() or any(path.exists() for path in self._folder.contents):
            msg = f"{self._folder.root} holds a run already; choose another name for the branch, or remove the folder"
            raise ConfigError(msg)
        if fixed := fixed_of(self._changed):
            msg = f"{fixed[0]} cannot differ in a branch: the rows and the weights of run {self._recording.run} have it"
            raise ConfigError(msg)
        if self._step >= self.config.run.steps:
            msg = f"a branch at step {self._step} needs run.steps above it; run.steps is {self.config.run.steps}"
            raise ConfigError(msg)

    def make(self, progress: Progress = lambda _: None) -> RunFolder:
        """Make the new run's folder, atomically; raises ConfigError if the step is gone."""
        janitor = Janitor(folder=str(durable_folder.temporary_path(self._folder.root)))
        try:
            durable_folder.write(self._folder.root, lambda folder: self._fill(folder, progress))
        finally:
            janitor.close()
        return self._folder

    def _fill(self, folder: Path, progress: Progress) -> None:
        make_private_folder(folder)
        own = RunFolder(folder)
        numbered = self._models(own, progress)
        self._copy_files(own)
        with _table_of(own, self.config) as table:
            rows = self._row_cells()
            written = {cell_id.field for cell_id, _ in rows}
            for kind, number, value in [*self._history(), *numbered]:
                table.put(table.subjects.numbered(kind, number), value)
            table.put_encoded([(table.subjects.cell(cell_id.row, cell_id.field), cell.data) for cell_id, cell in rows])
            self._acknowledge(table, written)
        own.save_config(self.config, self._recording.at.folder.import_path)

    def _models(self, own: RunFolder, progress: Progress) -> list[tuple[str, int, object]]:
        """Write a checkpoint of each model before the step; return the cells that name them."""
        step, cells = self._step, list[tuple[str, int, object]]()
        trained = sum(len(batch.rows) for batch in self._recording.cells("batch", range(step), Batch).values())
        for name in ["policy", *(["critic"] if self.config.critic is not None else [])]:
            replayer = Replayer(self._recording, self._recording.config, name, progress)
            try:
                replayer.advance(step)
                parent = own.checkpoints if name == "policy" else own.critic_checkpoints
                folder = parent / f"{step}.0"
                durable_folder.write(folder, replayer.model.save)
                fingerprint, prefixes = replayer.model.engine.fingerprint(), replayer.model.prefixes()
            finally:
                replayer.model.close()
            path = str(folder.relative_to(own.root))
            if name == "policy":
                checkpoint = Checkpoint(step, path, fingerprint, step, RowCounts(trained, trained))
                coefficient = self._recording.weights([step])[step].kl_coefficient
                file = Shard(f"weights/{step}.0.safetensors", 0, fingerprint)
                weights = Weights(step, fingerprint, [file], 0, None, coefficient, prefixes)
                cells += [("checkpoint", step, checkpoint), ("weights", step, weights)]
            else:
                checkpoint = Checkpoint(step, path, fingerprint, step, RowCounts())
                cells += [
                    ("critic_checkpoint", step, checkpoint),
                    ("critic", step, CriticVersion(step, fingerprint, 0)),
                ]
        return cells

    def _history(self) -> Iterator[tuple[str, int, object]]:
        """Yield the cells about the steps below: batches, results of evaluations, the reference."""
        recording = self._recording
        for number, batch in recording.cells("batch", range(self._step), Batch).items():
            yield "batch", number, replace(batch, incarnation=0)
        for version, result in recording.all_cells("evaluation", Evaluation).items():
            if version <= self._step:
                yield "evaluation", version, result
        first = recording.weights([0]).get(0)
        if first is not None and "reference" in self.config.roles and self._step > 0:
            yield "weights", 0, replace(first, incarnation=0)

    def _row_cells(self) -> list[tuple[CellId, Cell]]:
        """Return the cells of the step's rows that stay valid with the settings of the branch."""
        table = self._recording.table
        subjects = table.list_subjects(f"{table.subjects.prefix}.group.{self._step}.>")
        stale = {column for key in self._changed for column in RESCORED.get(key.partition(".")[0], ())}
        if self.config.from_data:
            stale.clear()
        cells = []
        for subject, cell in zip(subjects, table.get_all(subjects), strict=True):
            cell_id = table.subjects.parse(subject)
            if cell is not None and cell_id.field not in stale:
                cells.append((cell_id, cell))
        order = {"prompt": 0, "media": 1, "trajectory": 2, "reward": 3}
        return sorted(cells, key=lambda each: (order.get(each[0].field, 9), each[0].index))

    def _copy_files(self, own: RunFolder) -> None:
        """Copy arrays of the step's rows, reference weights, and held-out answers."""
        source, target = self._recording.table.store.root, own.root / "store"
        make_private_folder(target)
        for name in (f"group/{self._step}", "media"):
            if (source / name).is_dir():
                shutil.copytree(source / name, target / name, copy_function=_link)
        theirs = self._recording.at.folder
        for folder, copy in ((theirs.reference, own.reference), (theirs.references, own.references)):
            if folder.is_dir():
                shutil.copytree(folder, copy, copy_function=_link)
        if theirs.evaluations.is_dir():
            own.evaluations.mkdir()
            for file in theirs.evaluations.glob("*.jsonl"):
                if file.stem.isdigit() and int(file.stem) <= self._step:
                    shutil.copyfile(file, own.evaluations / file.name)

    def _acknowledge(self, table: Table, columns: set[str]) -> None:
        """Acknowledge rows for roles with a column, which would compute it again."""
        for name in role_names(self.config):
            role = make_role(self.config, name)
            if not isinstance(role, StatefulRole | ServiceRole) and role.writes in columns:
                table.connection.call(_acknowledge_all(table, name, overflows=role.spec.may_be_spot), CALL_DEADLINE)


def fixed_of(keys: Iterable[str]) -> list[str]:
    """Return those of some changed settings that a branch cannot change."""
    return sorted(key for key in keys if key.startswith(FIXED))


def _link(source: str, target: str) -> str:
    """Link a file that nobody changes, or copy it to another file system."""
    with suppress(OSError):
        os.link(source, target)
        return target
    return str(shutil.copyfile(source, target))


async def _acknowledge_all(table: Table, consumer: str, *, overflows: bool) -> None:
    """Acknowledge all messages that wait for a role.

    Args:
        table: table of the branch.
        consumer: durable consumer of the role.
        overflows: whether its requests name a group, see `pool_spec`.

    Raises:
        BrokerError: they are not delivered.
    """
    connection, stream = table.connection, table.subjects.table_stream
    info = await wait_for_consumer(connection, stream, consumer)
    backlog = (lambda: 0) if overflows else None
    pull = PullSubscription(connection, stream, consumer, PAGE, prefetch=False, backlog=backlog)
    await pull.start()
    left = info.num_pending or 0
    while left > 0:
        messages = await pull.fetch(PAGE, PATIENCE)
        if not messages:
            msg = (
                f"the broker of the branch did not deliver {left} rows of role {consumer} in {PATIENCE:g} s; try again"
            )
            raise BrokerError(msg)
        for message in messages:
            await message.ack_sync()
        left -= len(messages)
    await pull.close()


@contextmanager
def _table_of(own: RunFolder, config: Config) -> Iterator[Table]:
    """Start the broker of a new run, and open its table."""
    limits = ServerSettings(max_store=config.broker.max_bytes + config.broker.log_bytes + (1 << 30))
    server = Server(own.broker, limits, Users.operator(config.run.name))
    try:
        address = server.start()
        with closing(Connection(address, "root")) as connection:
            moved = config.model_copy(update={"run": config.run.model_copy(update={"folder": own.root})})
            connection.call(ensure_run_streams(connection, moved), 60)
            yield Table(connection, Subjects(config.run.name), Store(own.root / "store"), ROLE)
    finally:
        server.stop()
