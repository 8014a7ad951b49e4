"""Version 0 of the weights, kept twice where actors compute log-probs of it: in the store and in the run's folder."""

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


class Start:
    """Sees that both copies are there; each is made again from the other, after its fingerprint was checked."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: Weights | None = None

    def look_after(self) -> None:
        """Make again what is missing.

        Raises:
            ConfigError: both are lost, or the one left is not what was published.
        """
        context, store = self._context, self._context.table.store
        if self._known is None:
            self._known = fetch_own(context, context.table.subjects.numbered("weights", 0), Weights)
        known = self._known
        if known is None:
            return
        published, kept = [store.path(s.path) for s in known.shards], self._kept(known)
        served, safe = is_whole(store, known), all(path.exists() for path in kept)
        if served and safe:
            return
        if not served and not safe:
            msg = f"weights 0 are gone from the store, and so is {context.folder.reference}; restore one of the two"
            raise ConfigError(msg)
        self._check(known, published if served else kept)
        if served:

            def fill(folder: Path) -> None:
                for source, target in zip(published, kept, strict=True):
                    shutil.copyfile(source, folder / target.name)

            checkpoints.write(context.folder.reference, fill, context.wait_for_room)
            return
        for source, shard in zip(kept, known.shards, strict=True):
            store.write(shard.path, partial(shutil.copyfile, source))
        context.journal.event("weights_rewritten", version=0)

    def _kept(self, known: Weights) -> list[Path]:
        return [self._context.folder.reference / f"model.{Path(shard.path).name}" for shard in known.shards]

    def _check(self, known: Weights, paths: list[Path]) -> None:
        from relax_actors.weights import files as weights  # noqa: PLC0415 only the process that trains pays for torch

        try:
            found = weights.fingerprint(weights.load(paths).items())
        except StoreError as error:
            found = str(error)
        if found != known.fingerprint:
            msg = f"{paths[0].parent} does not hold weights 0 with fingerprint {known.fingerprint}: {found}; restore it"
            raise ConfigError(msg)


def is_whole(store: Store, weights: Weights) -> bool:
    """Whether all files of published weights are there in their full length."""
    try:
        return all(store.path(shard.path).stat().st_size == shard.nbytes for shard in weights.shards)
    except FileNotFoundError:
        return False
