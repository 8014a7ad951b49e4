"""What a run has recorded, opened so that nothing of the run changes.

A live run is read by look-ups, which create no consumer. The broker of a run that is not up is copied to a temporary
folder and started there; a janitor removes the folder, however the command ends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from broker.history import History
from broker.store import Store
from broker.table import Table
from relax_actors.config import Config
from relax_actors.errors import CodecError, ConfigError, StoreError
from relax_actors.isolation.janitor import Janitor
from relax_actors.messages import Batch, Checkpoint, Weights
from relax_actors.monitoring.access import Access
from relax_actors.monitoring.connection import Connected, connected
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.replay.settings import with_settings
from relax_actors.runtime import Context
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.streams import fetch_run_record

T = TypeVar("T")
LOOKUPS = 500
"""Cells that are looked up in one request."""


class ReadOnlyStore(Store):
    """Store of a run that is only read."""

    def write_together(self, uris: Sequence[str], save: Callable[..., T]) -> T:
        """Refuse to write files."""
        del save
        raise _refused(uris[0])

    def write_parts(self, uri: str, parts: list[Any]) -> None:
        """Refuse to write a segment."""
        del parts
        raise _refused(uri)


def _refused(uri: str) -> StoreError:
    return StoreError(f"{uri} cannot be written: a command that reads a run never changes it")


class Silent(Journal):
    """Journal that publishes nothing."""

    def event(self, kind: str, *, role: str | None = None, n: int | None = None, **fields: Any) -> None:
        """Drop an event."""

    def metric(self, values: dict[str, Any]) -> None:
        """Drop a metric."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a temporary folder that is removed at the end, also if this process is killed."""
    folder = Path(tempfile.mkdtemp(prefix="relax-replay-"))
    janitor = Janitor(folder=str(folder))
    try:
        yield folder
    finally:
        janitor.close()


@contextmanager
def opened(run: str, access: Access | None = None) -> Iterator[Recording]:
    """Open the record of a run, live or over.

    Args:
        run: name or folder of the run.
        access: options that replace the recorded address and credentials of the broker.

    Raises:
        ConfigError: no such run, or its broker cannot be reached or copied.
        BrokerError: the broker does not answer.
    """
    with scratch_folder() as scratch, connected(run, access, copy=scratch / "broker") as at:
        yield Recording(at, scratch)


@dataclass
class Recording:
    """Record of a run.

    Attributes:
        at: connection to its table.
        scratch: folder for temporary files.
    """

    at: Connected
    scratch: Path

    @property
    def run(self) -> str:
        """Name of the run."""
        return str(self.at.settings.run.name)

    @cached_property
    def table(self) -> Table:
        """The table, whose store refuses to be written."""
        table = self.at.table
        return Table(table.connection, table.subjects, ReadOnlyStore(table.store.root), "reader")

    @cached_property
    def config(self) -> Config:
        """The settings, with the folder's present place and all ranks on this machine."""
        config = self.at.config
        run = config.run.model_copy(update={"folder": self.at.folder.root})
        megatron = config.trainer.megatron.model_copy(update={"local_ranks": None})
        trainer = config.trainer.model_copy(update={"megatron": megatron})
        return config.model_copy(update={"run": run, "trainer": trainer})

    def config_with(self, settings: list[str]) -> Config:
        """Return the settings with `section.key=value` replaced; raises ConfigError if one is wrong."""
        return with_settings(self.config, settings, f"run {self.run}")

    def context(self, role: str, config: Config) -> Context:
        """Return the context of an actor that publishes nothing; files go to `scratch`."""
        table = self.table
        journal = Silent(table.connection, table.subjects, role, 0)
        folder = RunFolder(self.scratch / "run")
        return Context(config, folder, role, 0, 1, table, self.at.state, journal, node_folder=self.scratch)

    @cached_property
    def code(self) -> str:
        """Version of the code that started the run last; empty if it is unknown."""
        record = self.table.connection.call(fetch_run_record(self.at.state), 10)
        return "" if record is None else record.code

    def cells(self, kind: str, numbers: Iterable[int], expected: type[T]) -> dict[int, T]:
        """Return the well-formed numbered cells of a kind, by number."""
        wanted, table = list(numbers), self.table
        values: dict[int, T] = {}
        for begin in range(0, len(wanted), LOOKUPS):
            part = wanted[begin : begin + LOOKUPS]
            cells = table.get_all([table.subjects.numbered(kind, number) for number in part])
            for number, cell in zip(part, cells, strict=True):
                with suppress(CodecError):
                    if cell is not None:
                        values[number] = table.read(cell.data, expected, subject=cell.subject)
        return values

    def numbers(self, kind: str) -> list[int]:
        """Return the numbers of the cells of a kind, in order."""
        subjects = self.table.list_subjects(self.table.subjects.numbered(kind, "*"))
        return sorted(self.table.subjects.parse(subject).step for subject in subjects)

    def all_cells(self, kind: str, expected: type[T]) -> dict[int, T]:
        """Return all well-formed numbered cells of a kind, by number."""
        return self.cells(kind, self.numbers(kind), expected)

    def checkpoints(self, kind: str = "checkpoint") -> dict[int, Checkpoint]:
        """Return the published checkpoints by version, kept or not."""
        return self.all_cells(kind, Checkpoint)

    def figures(self, role: str, kind: str) -> dict[int, dict[str, Any]]:
        """Return published metrics of a kind by step, of the last computation of each."""
        subjects, connection = self.table.subjects, self.table.connection
        history = History(connection, subjects.log_stream, subjects.metric(role, "*"))
        figures: dict[int, dict[str, Any]] = {}
        while page := connection.call(history.page(), 60):
            for cell in page:
                message = LogMessage.parse(cell.subject, cell.data)
                if message is not None and message.kind == kind and not message.claim:
                    step = message.body.get("step")
                    if isinstance(step, int):
                        figures[step] = message.body
        return figures

    def batch(self, step: int) -> Batch:
        """Return the batch of a step; raises ConfigError if the step was not trained."""
        batch = self.cells("batch", [step], Batch).get(step)
        if batch is None:
            newest = max(self.numbers("batch"), default=None)
            until = "none yet" if newest is None else f"steps 0 to {newest}"
            msg = f"run {self.run} has not trained step {step}; it has trained {until}"
            raise ConfigError(msg)
        return batch

    def checkpoint_before(self, version: int, kind: str = "checkpoint") -> Checkpoint:
        """Return the newest kept checkpoint from which a version can be computed again.

        Raises:
            ConfigError: no checkpoint, or no rows, from which the version could be computed are left.
        """
        published = self.checkpoints(kind)
        policy = published if kind == "checkpoint" else self.checkpoints()
        floor = max((cell.floor for cell in policy.values()), default=0)
        root = self.at.folder.root
        kept = {v: cell for v, cell in published.items() if v >= floor and (root / cell.path).is_dir()}
        usable = [v for v in kept if v <= version]
        if usable:
            return kept[max(usable)]
        last = max(self.numbers("weights"), default=0)
        first = min((v for v in kept if v < last), default=None)
        steps = "no step" if first is None else f"steps {first} to {last - 1}"
        msg = (
            f"step {version} of run {self.run} was not kept: of the rows and checkpoints that remain, {steps} can be "
            f"computed again. run.keep_steps keeps those of the newest steps (it is {self.at.settings.run.keep_steps} "
            "here); it may be set when a run starts and when it is resumed: relax up CONFIG run.keep_steps=100"
        )
        raise ConfigError(msg)

    def devices_around(self, step: int, kind: str = "checkpoint") -> tuple[str, ...]:
        """Return the devices of the checkpoints before and behind a step.

        The latter is of the incarnation that trained up to it. A device is empty where it is unknown.
        """
        published = self.checkpoints(kind)
        later = min((version for version in published if version > step), default=None)
        return self.checkpoint_before(step, kind).device, "" if later is None else published[later].device

    def weights(self, versions: Iterable[int]) -> dict[int, Weights]:
        """Return the published weights by version."""
        return self.cells("weights", versions, Weights)
