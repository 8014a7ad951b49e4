"""Publishes the trainer's weights; removes old versions; exports the final model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from relax_actors.algorithms.schedules import is_evaluated, last_evaluated, reference_version
from relax_actors.errors import ConfigError, FencedError
from relax_actors.messages import Shard, Weights
from relax_actors.runtime import Context
from relax_actors.runtime import durable_folder as checkpoints
from relax_actors.runtime.cells import fetch_own, put_own
from relax_actors.weights.protocols import SupportsPrefixes, WeightProducer
from relax_actors.weights.provenance import write_provenance
from relax_actors.weights.reference_weights import ReferenceWeights, has_all_files
from relax_actors.weights.transports import make_transport

MAX_PENDING_EVALUATIONS = 16
"""At most so many versions are kept for evaluations that lag behind; rows of older versions are dropped."""
MODEL_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"),
    "generation_config.json",
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
)


class Publisher:
    """Publishes a trainer's weights while its next step computes (`PublisherActor`).

    `before_publication` is called with a version before it is published for the first time.
    """

    def __init__(
        self, context: Context, engine: WeightProducer, before_publication: Callable[[int], None] = lambda _: None
    ) -> None:
        self._before_publication = before_publication
        self.context, self._engine = context, engine
        self._latest: Weights | None = None
        # Base of the engine's next delta.
        self._base: Weights | None = None
        # Published cells by version, as far as they were read.
        self._cells: dict[int, Weights] = {}
        self._sender = make_transport(context).make_sender(engine)
        self._reference = ReferenceWeights(context) if "reference" in context.config.roles else None

    def close(self) -> None:
        """Stop the sender, and finish removing collected segments."""
        self._sender.close()
        self.context.table.store.close()

    def publish(self, version: int, kl_coefficient: float | None = None) -> None:
        """Write and publish the current weights, and the coefficient of the KL in the reward.

        A version published by an earlier incarnation is not republished: the replayed weights must equal it bit for
        bit.

        Raises:
            FencedError: a later incarnation published it.
            ConfigError: with run.deterministic, the replayed weights differ from the published ones.
        """
        context, table = self.context, self.context.table
        subject = table.subjects.numbered("weights", version)
        known = fetch_own(context, subject, Weights) if context.incarnation > 1 else None
        if known is None:
            cell = replace(self._write(version), kl_coefficient=kl_coefficient, tensors=self._prefixes())
            # Receivers ask for the weights as soon as they see the cell, so the sender must hold them before.
            self._sender.offer(cell)
            self._before_publication(version)
            known = put_own(context, subject, cell)
            if known is None:
                self._set_base(cell)
                self._restore_references(version)
                self._collect(version)
                return
        if known.incarnation > context.incarnation:
            msg = f"weights {version} were published by a later incarnation; this one exits"
            raise FencedError(msg)
        digest = self._engine.fingerprint()
        if digest == known.fingerprint:
            self._set_base(known)
            self._rewrite_missing(known)
        else:
            self._base = None
            context.journal.event("replay_diverged", version=version, published=known.fingerprint, found=digest)
            if context.config.run.deterministic:
                msg = f"weights {version} of the replay have fingerprint {digest}, published was {known.fingerprint}"
                raise ConfigError(msg)
        self._restore_references(version)
        self._collect(version)

    def _prefixes(self) -> bytes:
        return self._engine.prefixes() if isinstance(self._engine, SupportsPrefixes) else b""

    def _restore_references(self, version: int) -> None:
        if self._reference is not None:
            self._reference.restore_missing(self._references(version))

    def _references(self, version: int) -> set[int]:
        """Return the versions that score rows as their reference while a version is the latest."""
        config = self.context.config
        # Rows that are in flight may belong to steps as old as the last few versions.
        steps = range(max(0, version - config.staleness.max - 3), version + config.staleness.max + 1)
        return {0, *(reference_version(config, step) for step in steps)}

    def _write(self, version: int) -> Weights:
        """Write the weight file of a version: a delta where it pays off, else the full set."""
        if not self._is_read(version):
            return Weights(version, self._engine.fingerprint(), [], self.context.incarnation)
        base = self._base
        needs_full_set = base is None or self._is_reference(version) or self._needs_full_set(base)
        write_delta = None if needs_full_set else self._engine.delta()
        fingerprint, shards = self._write_files(self._uris(version), write_delta or self._engine.publish)
        base_version = base.version if write_delta is not None and base is not None else None
        return Weights(version, fingerprint, shards, self.context.incarnation, base_version)

    def _is_read(self, version: int) -> bool:
        """Whether an actor may read a version; with data only reference and evaluation do."""
        config = self.context.config
        if config.generates or config.roles.keys() - {"reference"}:
            return True
        return version == 0 or self._is_reference(version) or is_evaluated(config, version)

    def _is_reference(self, version: int) -> bool:
        """Whether a version becomes a reference, whose copy is a full set."""
        every = self.context.config.algorithm.reference_every
        return every is not None and version % every == 0

    def _uris(self, version: int) -> list[str]:
        """Return the names of the files of a version.

        The incarnation in the name keeps a replaced trainer from overwriting the files of its successor.
        """
        name, count = f"weights/{version}.{self.context.incarnation}", self._engine.shards
        return [f"{name}.safetensors"] if count == 1 else [f"{name}.{n}.safetensors" for n in range(count)]

    def _needs_full_set(self, base: Weights) -> bool:
        """Whether a late joiner would read too much if the next version were a delta to `base`."""
        chain = self._delta_chain(base.version)
        sizes = [sum(shard.nbytes for shard in cell.shards) for cell in chain]
        return (
            not chain
            or not chain[-1].shards
            or len(chain) >= self.context.config.weights.full_every
            or sum(sizes[:-1]) > sizes[-1]
        )

    def _delta_chain(self, version: int) -> list[Weights]:
        """Return the cells from a version back to its full set; empty if one of them is unknown."""
        table, chain = self.context.table, []
        current: int | None = version
        while current is not None:
            subject = table.subjects.numbered("weights", current)
            cell = self._cells.get(current) or fetch_own(self.context, subject, Weights)
            if cell is None:
                return []
            self._cells[current] = cell
            chain.append(cell)
            current = cell.base_version
        return chain

    def _set_base(self, cell: Weights) -> None:
        self._latest = self._base = self._cells[cell.version] = cell
        self._sender.offer(cell)
        self._engine.remember()

    def restore(self, version: int, kl_coefficient: float | None = None) -> None:
        """Publish a version, or rewrite its files if the store lost them; see `publish`."""
        table = self.context.table
        known = fetch_own(self.context, table.subjects.numbered("weights", version), Weights)
        if known is None:
            self.publish(version, kl_coefficient)
        elif known.fingerprint == self._engine.fingerprint():
            self._set_base(known)
            self._write_full(known)
        self._restore_references(version)

    def repair(self) -> None:
        """Rewrite the files of the latest version if they are gone: receivers remove corrupt files."""
        self._restore_references(0 if self._latest is None else self._latest.version)
        if self._latest is not None and self._rewrite_missing(self._latest):
            self.context.journal.event("weights_rewritten", version=self._latest.version)

    def _rewrite_missing(self, known: Weights) -> bool:
        """Rewrite a version as a full set if a file of it is missing; return whether one was."""
        if has_all_files(self.context.table.store, known):
            return False
        self._write_full(known)
        return True

    def _write_full(self, known: Weights) -> None:
        """Write the full set to the files of a version, if it has any.

        They may have held a delta before: each file says which it is.
        """
        if not known.shards:
            return
        _, shards = self._write_files([shard.path for shard in known.shards], self._engine.publish)
        self._latest = replace(known, shards=shards)

    def _write_files(self, uris: list[str], write: Callable[..., str]) -> tuple[str, list[Shard]]:
        """Write the files of a version into the store; return its fingerprint, and the files.

        Sizes are read before the files get their final names: after that a receiver may remove them.
        """

        def save(*paths: Path) -> tuple[str, list[Shard]]:
            fingerprint, sizes = write(*paths), [path.stat().st_size for path in paths]
            return fingerprint, [Shard(uri, size, fingerprint) for uri, size in zip(uris, sizes, strict=True)]

        return self.context.table.store.write_together(uris, save)

    def _collect(self, version: int) -> None:
        """Remove old versions, but not recent ones, references, evaluated ones, and bases."""
        config = self.context.config
        recent = version - config.staleness.max - 3
        kept = {*range(max(0, recent), version + 1), *last_evaluated(config, version)}
        kept |= {*self._pending_evaluations(recent)}
        if self._reference is not None:
            kept |= self._references(version)
        kept |= {cell.version for v in kept for cell in self._delta_chain(v)}
        self._cells = {v: cell for v, cell in self._cells.items() if v in kept}
        for path in self.context.table.store.path("weights").glob("*.safetensors"):
            number = path.name.split(".", 1)[0]
            if number.isdigit() and int(number) < recent and int(number) not in kept:
                path.unlink(missing_ok=True)
        for path in self.context.table.store.path("weights").glob(".*.tmp"):
            # `.<version>.<incarnation>.safetensors.<pid>.tmp`; a later incarnation may be writing its own.
            incarnation = path.name.split(".")[2]
            if incarnation.isdigit() and int(incarnation) < self.context.incarnation:
                path.unlink(missing_ok=True)

    def _pending_evaluations(self, before: int) -> list[int]:
        """Return the latest versions below `before` whose evaluation has not finished."""
        config, table = self.context.config, self.context.table
        present = {path.name.split(".", 1)[0] for path in table.store.path("weights").glob("*.safetensors")}
        numbers = sorted((int(n) for n in present if n.isdigit() and int(n) < before), reverse=True)
        evaluated = [n for n in numbers if config.eval is not None and is_evaluated(config, n)]
        evaluated = evaluated[:MAX_PENDING_EVALUATIONS]
        cells = table.get_all(table.subjects.numbered("evaluation", n) for n in evaluated)
        return [n for n, cell in zip(evaluated, cells, strict=False) if cell is None]

    def export(self) -> None:
        """Write the trained model as a Hugging Face folder."""
        source = self.context.config.model_path

        def save(folder: Path) -> None:
            self._engine.export(folder)
            for name in MODEL_FILES:
                if (source / name).exists() and not (folder / name).exists():
                    shutil.copy(source / name, folder / name)
            write_provenance(self.context, folder)

        checkpoints.write(self.context.folder.model, save, self.context.wait_for_room)
