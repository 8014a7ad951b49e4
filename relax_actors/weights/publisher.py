"""What the trainer gives out: weights in the store, published by a cell; the model at the end; the floor."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from broker.table import CALL_DEADLINE
from relax_actors.algorithms.schedules import is_evaluated, last_evaluated
from relax_actors.errors import ConfigError, FencedError
from relax_actors.messages import Shard, Weights
from relax_actors.runtime import Context
from relax_actors.runtime import durable_folder as checkpoints
from relax_actors.runtime.cells import fetch_own, put_own
from relax_actors.weights.initial import Start, is_whole
from relax_actors.weights.protocol import PublishesWeights
from relax_actors.weights.transport import sender_of

# Columns that outlive their rows: what was quarantined, and what became of it.
KEPT = ("quarantined", "requeued", "readmitted")
AWAITED = 16
"""So many versions at most are kept for evaluations that are behind; the rows of older ones are dropped."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


class Publisher:
    """Publishes the weights of one trainer, in a thread of its own: the next step's rows are computed on meanwhile.

    Until `settle` returns the engine's weights must not change.
    """

    def __init__(self, context: Context, engine: PublishesWeights) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._pending: Future[None] | None = None
        self._context, self._engine = context, engine
        self._latest: Weights | None = None
        # What the engine's next delta is to, and the publications by version as far as they were read.
        self._base: Weights | None = None
        self._cells: dict[int, Weights] = {}
        self._sender = sender_of(context, engine)
        self._start: Start | None = Start(context) if "reference" in context.config.roles else None

    def publish(self, version: int) -> None:
        """Begin to write the weights into the store and to publish them.

        A version published by an earlier life stays as it is; ours must equal it bit for bit.
        """
        self.settle()
        self._pending = self._thread.submit(self._publish, version)

    def settle(self) -> None:
        """Wait until what was begun is published.

        Raises:
            FencedError: a later life published it.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
        self._sender.close()

    def _publish(self, version: int) -> None:
        context, table = self._context, self._context.table
        subject = table.subjects.numbered("weights", version)
        known = fetch_own(context, subject, Weights) if context.incarnation > 1 else None
        if known is None:
            cell = self._write(version)
            # Before it is published: who hears of it asks at once.
            self._sender.offer(cell)
            known = put_own(context, subject, cell)
            if known is None:
                self._go_on_from(cell)
                self._keep_start()
                self._collect(version)
                return
        if known.incarnation > context.incarnation:
            msg = f"weights {version} were published by a later incarnation; this incarnation exits"
            raise FencedError(msg)
        found = self._engine.fingerprint()
        if found == known.fingerprint:
            self._go_on_from(known)
            self._rewrite(known)
        else:
            self._base = None
            context.journal.event("replay_diverged", version=version, published=known.fingerprint, found=found)
            if context.config.run.deterministic:
                msg = f"weights {version} of the replay have fingerprint {found}, published was {known.fingerprint}"
                raise ConfigError(msg)
        self._keep_start()
        self._collect(version)

    def _keep_start(self) -> None:
        if self._start is not None:
            self._start.look_after()

    def _write(self, version: int) -> Weights:
        """Write the weights, or what changed since the version before if that is worth it."""
        base = self._base
        delta = None if base is None or self._whole_is_due(base) else self._engine.delta()
        # Each life writes files of its own: one that was replaced must not touch what its successor published.
        uri = f"weights/{version}.{self._context.incarnation}.safetensors"
        fingerprint, nbytes = self._write_file(uri, delta or self._engine.publish)
        shard = Shard(uri, nbytes, fingerprint)
        base_version = base.version if delta is not None and base is not None else None
        return Weights(version, fingerprint, [shard], self._context.incarnation, base_version)

    def _whole_is_due(self, base: Weights) -> bool:
        """Whether one that joins late would have to read too much, were the next version a delta to `base`."""
        way = self._way(base.version)
        sizes = [sum(shard.nbytes for shard in cell.shards) for cell in way]
        return not way or len(way) >= self._context.config.weights.full_every or sum(sizes[:-1]) > sizes[-1]

    def _way(self, version: int) -> list[Weights]:
        """The publications from a version back to the whole set that it stands on; empty if one is unknown."""
        table, way = self._context.table, []
        at: int | None = version
        while at is not None:
            cell = self._cells.get(at) or fetch_own(self._context, table.subjects.numbered("weights", at), Weights)
            if cell is None:
                return []
            self._cells[at] = cell
            way.append(cell)
            at = cell.base_version
        return way

    def _go_on_from(self, cell: Weights) -> None:
        self._latest = self._base = self._cells[cell.version] = cell
        self._sender.offer(cell)
        self._engine.remember()

    def restore(self, version: int) -> None:
        """See that the files of an published version are there: a store may have lost what the table still names."""
        self.settle()
        table = self._context.table
        known = fetch_own(self._context, table.subjects.numbered("weights", version), Weights)
        if known is None:
            self._publish(version)
        elif known.fingerprint == self._engine.fingerprint():
            self._go_on_from(known)
            self._write_whole(known)
        self._keep_start()

    def look_after(self) -> None:
        """Write weights in use again if their files are gone; whoever finds them bad removes them."""
        if self._pending is not None and not self._pending.done():
            return
        self.settle()
        self._keep_start()
        if self._latest is not None and self._rewrite(self._latest):
            self._context.journal.event("weights_rewritten", version=self._latest.version)

    def _rewrite(self, known: Weights) -> bool:
        """Write those files of a version that are missing; tells whether there were any."""
        if is_whole(self._context.table.store, known):
            return False
        self._write_whole(known)
        return True

    def _write_whole(self, known: Weights) -> None:
        """Write a version's file as a whole set, whether it was a delta or not: it says so itself."""
        written = [self._write_file(shard.path, self._engine.publish) for shard in known.shards]
        shards = [replace(shard, nbytes=nbytes) for shard, (_, nbytes) in zip(known.shards, written, strict=True)]
        self._latest = replace(known, shards=shards)

    def _write_file(self, uri: str, write: Callable[[Path], str]) -> tuple[str, int]:
        """Have a file written into the store; gives what that gave, and its bytes.

        These are counted before the file has its name: from then on somebody may remove it.
        """
        return self._context.table.store.write(uri, lambda path: (write(path), path.stat().st_size))

    def _collect(self, version: int) -> None:
        """Remove weights that nobody asks for: all but the last few, those to be evaluated, and what they stand on."""
        config = self._context.config
        recent = version - config.staleness.max - 3
        kept = {*range(max(0, recent), version + 1), *last_evaluated(config, version), *self._awaited(recent)}
        kept |= {cell.version for v in kept for cell in self._way(v)}
        if self._start is not None:
            kept.add(0)
        self._cells = {v: cell for v, cell in self._cells.items() if v in kept}
        for path in self._context.table.store.path("weights").glob("*.safetensors"):
            number = path.name.split(".", 1)[0]
            if number.isdigit() and int(number) < recent and int(number) not in kept:
                path.unlink(missing_ok=True)
        for path in self._context.table.store.path("weights").glob(".*.tmp"):
            # `.<version>.<incarnation>.safetensors.<pid>.tmp`; what a later life is writing is not ours to remove.
            incarnation = path.name.split(".")[2]
            if incarnation.isdigit() and int(incarnation) < self._context.incarnation:
                path.unlink(missing_ok=True)

    def _awaited(self, before: int) -> list[int]:
        """The last versions whose evaluation has not come to its end: generation may be behind."""
        config, table = self._context.config, self._context.table
        there = {path.name.split(".", 1)[0] for path in table.store.path("weights").glob("*.safetensors")}
        numbers = sorted((int(n) for n in there if n.isdigit() and int(n) < before), reverse=True)
        evaluated = [n for n in numbers if config.eval is not None and is_evaluated(config, n)]
        cells = table.get_all(table.subjects.numbered("evaluation", n) for n in evaluated[:AWAITED])
        return [n for n, cell in zip(evaluated, cells, strict=False) if cell is None]

    def purge(self, old: int, floor: int) -> None:
        """Let the rows of the steps from `old` up to `floor` go; their quarantined cells stay to be looked at."""
        if old >= floor:
            return
        table = self._context.table
        rows = f"{table.subjects.prefix}.group"
        # Of earlier steps too: a role that was slow, or dead for a while, may have written after a floor had passed.
        below = [cell for cell in table.list_cells(f"{rows}.>") if cell.step < floor]
        kept = {cell.step for cell in below if cell.field in KEPT}
        table.purge(f"{rows}.{step}.>" for step in {cell.step for cell in below} - kept)
        # What a quarantined row was asked stays with it.
        quarantined = {cell.row for cell in below if cell.field == "quarantined"}
        gone = [c for c in below if c.step in kept and c.field not in KEPT]
        table.purge(table.subject(c.row, c.field) for c in gone if c.field != "prompt" or c.row not in quarantined)
        for name in table.store.list_names("group"):
            if name.isdigit() and int(name) < floor:
                table.store.remove(f"group/{name}")
        forget = self._context.state.forget_failures(lambda row: row.kind == "group" and row.step < floor)
        table.connection.call(forget, CALL_DEADLINE)

    def export(self) -> None:
        """Write the trained model as a Hugging Face folder."""
        source = self._context.config.model_path

        def save(folder: Path) -> None:
            self._engine.export(folder)
            for name in TOKENIZER_FILES:
                if (source / name).exists() and not (folder / name).exists():
                    shutil.copy(source / name, folder / name)

        checkpoints.write(self._context.folder.model, save, self._context.wait_for_room)
