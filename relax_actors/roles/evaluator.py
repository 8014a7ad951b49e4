"""Role `evaluator`: evaluates selected weight versions on held-out prompts.

Held-out rows pass through the same columns as training rows, and their rewards are averaged. The result of a version is
one cell, `evaluation.<version>`. Rows are kept for the latest result only: the cell asks the trainer, which alone may
remove cells, to remove those of earlier results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from broker.subjects import CellId, RowId, Subjects
from relax_actors.algorithms.schedules import is_evaluated
from relax_actors.config import Config
from relax_actors.config.rows import keeps_messages
from relax_actors.data.examples import row_of
from relax_actors.data.mixture import first_items
from relax_actors.data.prompt_maker import PromptMaker, admission_of, open_data, room
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import CodecError, ConfigError, StoreError
from relax_actors.messages import Evaluation, Prompt, Reward, Weights
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import StatefulRole
from relax_actors.runtime.cells import put_own, read_numbered
from relax_actors.runtime.seeds import derive_seed
from relax_actors.training.first_prompts import UNUSABLE_PROMPTS, FirstPrompts

if TYPE_CHECKING:
    from broker.table import Cell

EVAL_END_COLUMNS = ("reward", "dropped", "quarantined")
"""Columns that end an evaluation row."""


class Evaluator(StatefulRole):
    """Owns the evaluation rows `eval.<version>.<index>`.

    Each row is answered greedily by exactly its version.

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
        self._settings = config.eval
        self._source = open_data(config.eval.data, config.media)
        self._items = first_items(self._source, config.eval.rows)
        self._rows = len(self._items)
        tokenizer = Tokenizer(config.model_path)
        admission = admission_of(config, self.context.table.store)
        self._maker = PromptMaker(
            config.eval.data,
            tokenizer,
            room(config),
            config.rollout.max_tokens,
            admission,
            keeps_messages=keeps_messages(config),
        )
        # Mean reward of each ended row by version and index; None for rows without a reward.
        self._ended: dict[int, dict[int, float | None]] = {}
        self._done: set[int] = set()
        self._latest: tuple[int, float] | None = None
        self._first_prompts = FirstPrompts(self.context, min(UNUSABLE_PROMPTS, self._rows))

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
            elif cell_id.kind == "evaluation":
                self._record_result(cell_id, cell)
            elif cell_id.kind == "eval" and cell_id.step not in self._done and cell_id.index < self._rows:
                self._record_end(cell_id, cell)
        for version in sorted(published - self._done):
            if len(self._ended.get(version, {})) < self._rows:
                self._admit(version)
        complete = [version for version, ended in sorted(self._ended.items()) if len(ended) >= self._rows]
        for version in complete:
            self._publish_result(version)
        self.context.report_waiting("a version to evaluate")

    def _record_end(self, cell_id: CellId, cell: Cell) -> None:
        """Record the reward of an ended row; a row that ends twice counts once."""
        ended = self._ended.setdefault(cell_id.step, {})
        if cell_id.index in ended:
            return
        ended[cell_id.index] = None
        if cell_id.field == "reward":
            try:
                ended[cell_id.index] = float(self.context.table.read(cell.data, Reward).values.mean())
            except (CodecError, StoreError) as error:
                self.context.journal.event("malformed_cell", subject=cell.subject, error=str(error))

    def _publish_result(self, version: int) -> None:
        """Publish the mean reward of a version's rows."""
        values = [value for value in self._ended.pop(version).values() if value is not None]
        result = Evaluation(version, sum(values) / len(values) if values else 0.0, len(values))
        table = self.context.table
        self._done.add(version)
        self._latest = version, result.reward
        if put_own(self.context, table.subjects.numbered("evaluation", version), result) is None:
            self.context.journal.event("evaluated", version=version, reward=result.reward, rows=result.rows)

    def _record_result(self, cell_id: CellId, cell: Cell) -> None:
        """Record a published result; the trainer removes a malformed cell."""
        value = read_numbered(self.context, cell, Evaluation)
        if value is None:
            return
        self._done.add(cell_id.step)
        self._ended.pop(cell_id.step, None)
        self._latest = cell_id.step, value.reward

    def _admit(self, version: int) -> None:
        """Write the prompts of a version's rows; existing prompts are kept.

        Raises:
            AllRowsFailedError: the first prompts cannot be made, all for one reason.
        """
        rows = [RowId(version, index, "eval") for index in range(self._rows)]
        self.context.table.put_encoded(self._first_prompts.cells(rows, self._prompt))
        self._first_prompts.check()

    def _prompt(self, row: RowId) -> Prompt:
        seed = derive_seed(self.context.config.run.seed, "eval", row.index)
        task = self._source[self._items[row.index]]
        fields: dict[str, Any] = {"seed": seed, "min_version": row.step, "exact_version": True, "greedy": True}
        if self.context.config.from_data:
            return row_of(task, media=self._maker.media_of(task, row), **fields)
        return self._maker.make(task, row, **fields)

    def metrics(self) -> dict[str, float]:
        """Return the version and the mean reward of the latest result."""
        return {} if self._latest is None else {"eval_version": self._latest[0], "eval_reward": self._latest[1]}
