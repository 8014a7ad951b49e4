"""Evaluator: sends held-out prompts through the same columns for chosen versions, and adds the rewards up.

What a version came to is one cell, `evaluation.<version>`. The rows themselves are kept of the last version only.
"""

from __future__ import annotations

from functools import partial

from broker.subjects import CellId, RowId
from broker.table import CALL_DEADLINE, Cell
from relax_actors.algorithms.schedules import is_evaluated
from relax_actors.data.prompt_maker import PromptMaker, open_data, room
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import CodecError, ConfigError, StoreError
from relax_actors.messages import Evaluation, Prompt, Reward
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.prompts import first_cell
from relax_actors.runtime import StatefulRole
from relax_actors.runtime.cells import put_own, read_numbered
from relax_actors.runtime.seeds import derive_seed

ENDS = ("reward", "dropped", "quarantined")


class Evaluator(StatefulRole):
    """Owns the evaluation rows `eval.<version>.<index>`, answered greedily by just that version."""

    writes = "prompt"
    spec = RoleSpec(
        reads=ENDS,
        writes=("prompt", "quarantined"),
        kinds=("eval",),
        numbered=("evaluation",),
        removes=True,
        single=True,
        section="prompts",
        requires="eval",
        start_order=40,
    )

    def setup(self) -> None:
        """Open the held-out data."""
        config = self.context.config
        if config.eval is None:
            msg = "the evaluator needs a section [eval]"
            raise ConfigError(msg)
        self._settings = config.eval
        self._source = open_data(config.eval.data)
        self._rows = min(config.eval.rows, len(self._source))
        tokenizer = Tokenizer(config.model_path)
        self._maker = PromptMaker(config.eval.data, tokenizer, room(config), config.rollout.max_tokens)
        self._ended: dict[int, dict[int, float | None]] = {}
        self._done: set[int] = set()
        self._latest: tuple[int, float] | None = None

    def follows(self) -> list[str]:
        """Versions, what they came to, and how evaluation rows end."""
        subjects = self.context.table.subjects
        numbered = [subjects.numbered(kind, "*") for kind in ("weights", "evaluation")]
        return [*numbered, *(subjects.column(name, "eval") for name in ENDS)]

    def recover(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Read again what was evaluated."""
        self.on_cells(cells)
        # The life before may have ended before it had let all rows go.
        self._let_go()

    def on_cells(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Ask for versions that are there, add up those that are done."""
        config = self.context.config
        wanted: set[int] = set()
        for cell_id, cell in cells:
            if not is_evaluated(config, cell_id.step):
                continue
            if cell_id.kind == "weights" and read_numbered(self.context, cell_id, cell) is not None:
                wanted.add(cell_id.step)
            elif cell_id.kind == "evaluation":
                self._is_done(cell_id, cell)
            elif cell_id.kind == "eval" and cell_id.step not in self._done and cell_id.index < self._rows:
                self._end(cell_id, cell)
        for version in sorted(wanted - self._done):
            if len(self._ended.get(version, {})) < self._rows:
                self._ask(version)
        complete = [version for version, ended in sorted(self._ended.items()) if len(ended) >= self._rows]
        for version in complete:
            self._sum_up(version)
        if complete:
            self._let_go()
        self.context.report_waiting("a version to evaluate")

    def _end(self, cell_id: CellId, cell: Cell) -> None:
        ended = self._ended.setdefault(cell_id.step, {})
        if cell_id.index in ended:
            return
        ended[cell_id.index] = None
        if cell_id.field == "reward":
            try:
                ended[cell_id.index] = float(self.context.table.read(cell.data, Reward).values.mean())
            except (CodecError, StoreError) as error:
                self.context.journal.event("malformed_cell", subject=cell.subject, error=str(error))

    def _sum_up(self, version: int) -> None:
        """Write down what a version came to."""
        values = [value for value in self._ended.pop(version).values() if value is not None]
        found = Evaluation(version, sum(values) / len(values) if values else 0.0, len(values))
        table = self.context.table
        self._done.add(version)
        self._latest = version, found.reward
        if put_own(self.context, table.subjects.numbered("evaluation", version), found) is None:
            self.context.journal.event("evaluated", version=version, reward=found.reward, rows=found.rows)

    def _is_done(self, cell_id: CellId, cell: Cell) -> None:
        """A version was summed up, by this life or an earlier one; a cell that is not the evaluator's is removed."""
        value = read_numbered(self.context, cell_id, cell)
        if not isinstance(value, Evaluation):
            self.context.table.remove([cell])
            return
        self._done.add(cell_id.step)
        self._ended.pop(cell_id.step, None)
        self._latest = cell_id.step, value.reward

    def _let_go(self) -> None:
        """Remove the rows of versions that are summed up, all but the last, and what was written to them late."""
        table, state = self.context.table, self.context.state
        gone = self._done - {max(self._done, default=0)}
        there = {cell.step for cell in table.list_cells(f"{table.subjects.prefix}.eval.>")}
        table.purge(f"{table.subjects.prefix}.eval.{version}.>" for version in sorted(gone & there))
        for name in table.store.list_names("eval"):
            if name.isdigit() and int(name) in gone:
                table.store.remove(f"eval/{name}")
        table.connection.call(state.forget_failures(lambda row: row.kind == "eval" and row.step in gone), CALL_DEADLINE)

    def _ask(self, version: int) -> None:
        rows = [RowId(version, index, "eval") for index in range(self._rows)]
        self.context.table.put_encoded([first_cell(self.context, row, partial(self._prompt, row)) for row in rows])

    def _prompt(self, row: RowId) -> Prompt:
        seed = derive_seed(self.context.config.run.seed, "eval", row.index)
        task = self._source[row.index]
        return self._maker.make(task, seed=seed, min_version=row.step, exact_version=True, greedy=True)

    def metrics(self) -> dict[str, float]:
        """The last result."""
        return {} if self._latest is None else {"eval_version": self._latest[0], "eval_reward": self._latest[1]}
