"""Versions that score as a reference, in the store and in the run's folder."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path

from broker.store import Store
from relax_actors.errors import ConfigError, StoreError
from relax_actors.messages import Weights
from relax_actors.runtime import Context
from relax_actors.runtime import durable_folder as checkpoints
from relax_actors.runtime.cells import fetch_own


class ReferenceWeights:
    """Keeps two copies of reference versions; restores one from the verified other."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._cells: dict[int, Weights] = {}

    def restore_missing(self, versions: Collection[int]) -> None:
        """Restore missing copies of version 0 and `versions`; remove older copies.

        Does nothing for versions before they are published. A refreshed reference of which no copy is left has no
        reader: an earlier incarnation has removed it.

        Raises:
            ConfigError: both copies of version 0 are lost, or a remaining one does not have the published fingerprint.
        """
        context = self._context
        for version in sorted({0, *versions}):
            if version not in self._cells:
                cell = fetch_own(context, context.table.subjects.numbered("weights", version), Weights)
                if cell is None:
                    continue
                self._cells[version] = cell
            self._restore(self._cells[version])
        self._cells = {version: cell for version, cell in self._cells.items() if version in {0, *versions}}
        for folder in context.folder.references.glob("[0-9]*"):
            if int(folder.name) < max(versions, default=0) and int(folder.name) not in versions:
                shutil.rmtree(folder, ignore_errors=True)

    def _restore(self, cell: Weights) -> None:
        context, store = self._context, self._context.table.store
        published, backup = [store.path(s.path) for s in cell.shards], self._backup_paths(cell)
        is_published, is_backed_up = has_all_files(store, cell), all(path.exists() for path in backup)
        if is_published and is_backed_up:
            return
        if not is_published and not is_backed_up:
            if cell.version > 0:
                return
            msg = f"weights 0 are gone from the store, and so is {context.folder.reference}; restore one of the two"
            raise ConfigError(msg)
        self._check(cell, published if is_published else backup)
        if is_published:

            def fill(folder: Path) -> None:
                for source, target in zip(published, backup, strict=True):
                    shutil.copyfile(source, folder / target.name)

            checkpoints.write(self._folder(cell), fill, context.wait_for_room)
            return
        for source, shard in zip(backup, cell.shards, strict=True):
            store.write(shard.path, partial(shutil.copyfile, source))
        context.journal.event("weights_rewritten", version=cell.version)

    def _folder(self, cell: Weights) -> Path:
        folder = self._context.folder
        return folder.references / str(cell.version) if cell.version else folder.reference

    def _backup_paths(self, cell: Weights) -> list[Path]:
        return [self._folder(cell) / f"model.{Path(shard.path).name}" for shard in cell.shards]

    def _check(self, cell: Weights, paths: list[Path]) -> None:
        from relax_actors.weights import files as weights  # noqa: PLC0415 imports torch, for the trainer's process only

        try:
            actual = weights.fingerprint(weights.load(paths))
        except StoreError as error:
            actual = str(error)
        if actual != cell.fingerprint:
            msg = (
                f"{paths[0].parent} does not hold weights {cell.version} with fingerprint {cell.fingerprint}: "
                f"{actual}; restore it"
            )
            raise ConfigError(msg)


def has_all_files(store: Store, weights: Weights) -> bool:
    """Whether all files of published weights exist in their full length."""
    try:
        return all(store.path(shard.path).stat().st_size == shard.nbytes for shard in weights.shards)
    except FileNotFoundError:
        return False
