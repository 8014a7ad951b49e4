"""Role `evaluator`: evaluates selected weight versions on held-out prompts.

Held-out rows pass through the same columns as training rows. When all rows of a version have ended, their answers
become a file in the run's folder (`evaluation/records.py`), and the result of the version is one cell,
`evaluation.<version>`. Rows are kept for the latest result only: the cell asks the trainer, which alone may remove
cells, to remove those of earlier results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from broker.files import remove_unfinished
from broker.store import retry_when_full
from broker.subjects import CellId, RowId, Subjects
from relax_actors.algorithms.schedules import is_evaluated
from relax_actors.config import Config
from relax_actors.config.data import DataSection
from relax_actors.config.evaluation import ONLY_SET
from relax_actors.config.rows import keeps_messages
from relax_actors.data.examples import row_of
from relax_actors.data.mixture import first_items
from relax_actors.data.prompt_maker import PromptMaker, admission_of, open_data, room
from relax_actors.data.source import DataSource
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import ConfigError
from relax_actors.evaluation.collect import facts_of, records_of
from relax_actors.evaluation.figures import mean_reward, passed
from relax_actors.evaluation.records import Evaluated, Record, SetFacts, write_evaluation
from relax_actors.messages import Evaluation, Prompt, Weights
from relax_actors.messages.cells import SetResult
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import StatefulRole
from relax_actors.runtime.cells import put_own, read_numbered
from relax_actors.runtime.seeds import derive_seed
from relax_actors.training.first_prompts import UNUSABLE_PROMPTS, FirstPrompts

if TYPE_CHECKING:
    from broker.table import Cell

EVAL_END_COLUMNS = ("reward", "dropped", "quarantined")
"""Columns that end an evaluation row."""


class _Sums:
    """Sums over the records of an evaluation, for its result."""

    def __init__(self, sets: dict[str, SetFacts]) -> None:
        self._sets = sets
        self._rewards: dict[str, list[float]] = {name: [] for name in sets}
        self._passed: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, record: Record) -> None:
        """Add a record; rows without answers do not count."""
        facts = self._sets[record.set]
        if not record.answers:
            return
        self._rewards[record.set].append(mean_reward(record))
        if facts.passes is not None:
            each = passed(record, facts)
            self._passed[record.set].append(sum(each) / len(each))

    def result(self, version: int) -> Evaluation:
        """Return the result of a version."""
        sets = {
            name: SetResult(len(own), _mean(own), _share(self._passed[name])) for name, own in self._rewards.items()
        }
        values = [value for own in self._rewards.values() for value in own]
        return Evaluation(version, _mean(values), len(values), sets)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _share(values: Sequence[float]) -> float | None:
    return _mean(values) if values else None


class Evaluator(StatefulRole):
    """Owns the evaluation rows `eval.<version>.<index>`.

    Each row is answered by exactly its version, as its set of [eval] says.

    All methods but `metrics` run in the role's thread.
    """

    writes = "prompt"
    spec = RoleSpec(
        reads=EVAL_END_COLUMNS,
        writes=("prompt", "quarantined"),
        kinds=("eval",),
        numbered={"evaluation": Evaluation},
        single=True,
        section="prompts",
        requires="eval",
        start_order=40,
    )

    def setup(self) -> None:
        """Open the held-out data and the tokenizer."""
        config = self.context.config
        if config.eval is None:
            msg = "role evaluator needs a section [eval]; add it"
            raise ConfigError(msg)
        tokenizer, admission = Tokenizer(config.model_path), admission_of(config, self.context.table.store)
        self._sources: dict[str, DataSource] = {}
        self._makers: dict[str, PromptMaker] = {}
        # Items of the sources that are evaluated: the n-th is row n of the set.
        self._items: dict[str, list[int]] = {}
        for name, each in config.eval.named.items():
            self._sources[name] = open_data(each.source, config.media)
            self._items[name] = first_items(self._sources[name], each.rows)
            self._makers[name] = self._maker_of(each.source, each.max_tokens, tokenizer, admission)
        places = ((index, *config.eval.place(index)) for index in range(config.eval.total_rows))
        # Indices of the rows that the data of their set has.
        self._rows = [index for index, name, _, number in places if number < len(self._items[name])]
        self._facts, self._marks = facts_of(config), config.eval.marks()
        if self.context.folder.evaluations.is_dir():
            remove_unfinished(self.context.folder.evaluations)
        # Indices of the ended rows, and fingerprints of the weights, by version.
        self._ended: dict[int, set[int]] = {}
        self._fingerprints: dict[int, str] = {}
        self._done: set[int] = set()
        self._latest: Evaluation | None = None
        self._first_prompts = FirstPrompts(self.context, min(UNUSABLE_PROMPTS, len(self._rows)))

    def _maker_of(self, data: DataSection, max_tokens: int | None, tokenizer: Tokenizer, admission: Any) -> PromptMaker:
        config = self.context.config
        return PromptMaker(
            data,
            tokenizer,
            room(config),
            max_tokens or config.rollout.max_tokens,
            admission,
            keeps_messages=keeps_messages(config),
        )

    @classmethod
    def follows(cls, config: Config) -> list[str]:
        """Return the published versions, the results, and the columns that end evaluation rows."""
        subjects = Subjects(config.run.name)
        numbered = [subjects.numbered(kind, "*") for kind in ("weights", "evaluation")]
        return [*numbered, *(subjects.column(name, "eval") for name in EVAL_END_COLUMNS)]

    def recover(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Rebuild the results and continue unfinished evaluations."""
        self.on_cells(cells)

    def on_cells(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Admit rows of newly published versions, and publish the results of finished versions."""
        config = self.context.config
        published: set[int] = set()
        for cell_id, cell in cells:
            if not is_evaluated(config, cell_id.step):
                continue
            if cell_id.kind == "weights":
                weights = read_numbered(self.context, cell, Weights)
                # Where rows come from data, versions that nobody was to evaluate then have no files.
                if weights is not None and (weights.shards or not config.from_data):
                    published.add(cell_id.step)
                    self._fingerprints[cell_id.step] = weights.fingerprint
            elif cell_id.kind == "evaluation":
                self._record_result(cell_id, cell)
            elif cell_id.kind == "eval" and cell_id.step not in self._done:
                self._ended.setdefault(cell_id.step, set()).add(cell_id.index)
        for version in sorted(published - self._done):
            if not self._is_complete(version):
                self._admit(version)
        complete = [version for version in sorted(self._ended) if self._is_complete(version)]
        for version in complete:
            self._publish_result(version)
        self.context.report_waiting(self._awaited(published))

    def _awaited(self, published: Collection[int]) -> str:
        """Return what the role waits for."""
        if not (pending := sorted((set(self._ended) | set(published)) - self._done)):
            return "a version to evaluate"
        ended, rows = self._ended.get(pending[0], set()), len(self._rows)
        return f"answers of version {pending[0]}: {len(ended)} of {rows} held-out rows have ended"

    def _is_complete(self, version: int) -> bool:
        return self._ended.get(version, set()).issuperset(self._rows)

    def _publish_result(self, version: int) -> None:
        """Write the file of a version, then publish its result."""
        context, head = (
            self.context,
            Evaluated(self.context.config.run.name, version, self._fingerprints.get(version, ""), self._facts),
        )

        def write() -> Evaluation:
            sums = _Sums(self._facts)
            write_evaluation(path, head, self._records(version, sums))
            return sums.result(version)

        path = context.folder.evaluation(version)
        result = retry_when_full(write, context.folder.root, f"evaluations/{path.name}", context.wait_for_room)
        del self._ended[version]
        self._done.add(version)
        self._latest = result
        if put_own(context, context.table.subjects.numbered("evaluation", version), result) is None:
            context.journal.event("evaluated", version=version, reward=result.reward, rows=result.rows)

    def _records(self, version: int, sums: _Sums) -> Iterator[Record]:
        """Yield the records of a version; at the end, check that its rows were still there."""
        rows = [RowId(version, index, "eval") for index in self._rows]
        for record in records_of(self.context.table, self.context.config, rows, self.progress):
            sums.add(record)
            yield record
        self.context.raise_if_fenced()

    def _record_result(self, cell_id: CellId, cell: Cell) -> None:
        """Record a published result; the trainer removes a malformed cell."""
        value = read_numbered(self.context, cell, Evaluation)
        if value is None:
            return
        self._done.add(cell_id.step)
        self._ended.pop(cell_id.step, None)
        self._latest = value

    def _admit(self, version: int) -> None:
        """Write a version's missing prompts; raises AllRowsFailedError if the first all fail."""
        rows = [RowId(version, index, "eval") for index in self._rows]
        self.context.table.put_encoded(self._first_prompts.cells(rows, self._prompt))
        self._first_prompts.check()

    def _prompt(self, row: RowId) -> Prompt:
        config = self.context.config
        assert config.eval is not None  # noqa: S101 `setup` has checked it
        name, held_out, number = config.eval.place(row.index)
        task, maker = self._sources[name][self._items[name][number]], self._makers[name]
        # Of the set and the row in it alone: a set beside others has the answers that it has without them.
        parts = (number,) if name == ONLY_SET else (name, number)
        seed, greedy = derive_seed(config.run.seed, "eval", *parts), held_out.temperature == 0
        fields: dict[str, Any] = {"seed": seed, "min_version": row.step, "exact_version": True, "greedy": greedy}
        fields["mark"] = self._marks[row.index]
        if config.from_data:
            return row_of(task, media=maker.media_of(task, row), **fields)
        return maker.make(task, row, **fields)

    def metrics(self) -> dict[str, float]:
        """Return version and mean reward of the latest result, and of each of several sets."""
        latest = self._latest
        if latest is None:
            return {}
        several = latest.sets if set(latest.sets) != {ONLY_SET} else {}
        by_set = {f"eval_reward/{name}": result.reward for name, result in several.items()}
        return {"eval_version": latest.version, "eval_reward": latest.reward, **by_set}
