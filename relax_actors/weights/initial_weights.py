"""Version 0 of the weights, kept in the store and in the run's folder for scoring."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from broker.store import Store
from relax_actors.errors import ConfigError, StoreError
from relax_actors.messages import Weights
from relax_actors.runtime import Context
from relax_actors.runtime import durable_folder as checkpoints
from relax_actors.runtime.cells import fetch_own


class InitialWeights:
    """Keeps both copies of version 0; restores one from the verified other."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._cell: Weights | None = None

    def restore_missing(self) -> None:
        """Restore the missing copy, if there is one. Does nothing before version 0 is published.

        Raises:
            ConfigError: both copies are lost, or the remaining one does not have the published fingerprint.
        """
        context, store = self._context, self._context.table.store
        if self._cell is None:
            self._cell = fetch_own(context, context.table.subjects.numbered("weights", 0), Weights)
        cell = self._cell
        if cell is None:
            return
        published, backup = [store.path(s.path) for s in cell.shards], self._backup_paths(cell)
        is_published, is_backed_up = has_all_files(store, cell), all(path.exists() for path in backup)
        if is_published and is_backed_up:
            return
        if not is_published and not is_backed_up:
            msg = f"weights 0 are gone from the store, and so is {context.folder.reference}; restore one of the two"
            raise ConfigError(msg)
        self._check(cell, published if is_published else backup)
        if is_published:

            def fill(folder: Path) -> None:
                for source, target in zip(published, backup, strict=True):
                    shutil.copyfile(source, folder / target.name)

            checkpoints.write(context.folder.reference, fill, context.wait_for_room)
            return
        for source, shard in zip(backup, cell.shards, strict=True):
            store.write(shard.path, partial(shutil.copyfile, source))
        context.journal.event("weights_rewritten", version=0)

    def _backup_paths(self, cell: Weights) -> list[Path]:
        return [self._context.folder.reference / f"model.{Path(shard.path).name}" for shard in cell.shards]

    def _check(self, cell: Weights, paths: list[Path]) -> None:
        from relax_actors.weights import files as weights  # noqa: PLC0415 imports torch, for the trainer's process only

        try:
            found = weights.fingerprint(weights.load(paths))
        except StoreError as error:
            found = str(error)
        if found != cell.fingerprint:
            msg = f"{paths[0].parent} does not hold weights 0 with fingerprint {cell.fingerprint}: {found}; restore it"
            raise ConfigError(msg)


def has_all_files(store: Store, weights: Weights) -> bool:
    """Whether all files of published weights exist in their full length."""
    try:
        return all(store.path(shard.path).stat().st_size == shard.nbytes for shard in weights.shards)
    except FileNotFoundError:
        return False
