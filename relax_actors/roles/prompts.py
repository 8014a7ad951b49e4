"""PromptSource: admits rows as far ahead of the trained version as `staleness.max` allows, and replaces lost ones.

What it admits is a function of the configuration and the row's id, so that a new life of it admits the same.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from broker.subjects import CellId, RowId
from broker.table import Cell
from relax_actors.actor import Context, StatefulRole
from relax_actors.config.schema import Config, DataSection
from relax_actors.envs.sources import PromptSource as Source
from relax_actors.envs.sources import open_source
from relax_actors.envs.tasks import Task
from relax_actors.errors import CodecError, RowError
from relax_actors.ledger import Ledger
from relax_actors.messages import Dropped, DropReason, Prompt, Quarantined
from relax_actors.modelfolder import measure
from relax_actors.roles.reading import observe
from relax_actors.roles.seeds import seed_of, task_index
from relax_actors.tokenizer import Tokenizer


def open_data(data: DataSection) -> Source:
    """The source of a [data] section.

    Raises:
        ConfigError: it cannot be opened, or holds not one good row.
    """
    fields = ("path", "task", "function", "size", "seed", "options", "prompt_field", "answer_field")
    return open_source(data.kind, **{name: getattr(data, name) for name in fields})


def room(config: Config) -> int:
    """Tokens that a sequence may have: the model's context, and what the trainer takes at once."""
    return min(measure(config.model_path).context_length, config.trainer.token_budget)


class PromptMaker:
    """Turns tasks into prompts: template, chat, tokens, and the check that they fit the model."""

    def __init__(self, data: DataSection, tokenizer: Tokenizer, whole: int, max_tokens: int) -> None:
        self._data, self._tokenizer = data, tokenizer
        self._room = whole - max_tokens
        self._whole, self._max_tokens = whole, max_tokens

    def make(self, task: Task, **fields: Any) -> Prompt:
        """The prompt of a task.

        Raises:
            RowError: it is too long for the model's context, or has no tokens.
        """
        text = self.text(task)
        chat = not isinstance(task.prompt, str) or self._chats
        tokens = self._tokenizer.encode(text, special=not chat)
        if len(tokens) > self._room or not len(tokens):
            msg = (
                f"prompt {text[:60]!r} has {len(tokens)} tokens; sequences of up to {self._whole} (the context, "
                f"or trainer.token_budget) leave 1 to {self._room} beside rollout.max_tokens = {self._max_tokens}"
            )
            raise RowError(msg)
        return Prompt(text, tokens, task.answer, task.metadata, **fields)

    @property
    def _chats(self) -> bool:
        return self._tokenizer.has_chat_template if self._data.chat is None else self._data.chat

    def text(self, task: Task) -> str:
        """What the model reads."""
        messages = task.prompt
        if isinstance(messages, str):
            text = self._data.template.replace("{prompt}", messages)
            if not self._chats:
                return text
            messages = [{"role": "user", "content": text}]
        if self._data.system is not None:
            messages = [{"role": "system", "content": self._data.system}, *messages]
        return self._tokenizer.chat(messages)


def first_cell(context: Context, row: RowId, make: Callable[[], Prompt]) -> tuple[str, bytes]:
    """Subject and content of the cell that begins a row: its prompt, or why it can have none."""
    table = context.table
    subject = table.cell(row, "prompt")
    try:
        return subject, table.encode(subject, make())
    except (RowError, CodecError) as error:
        trace = "".join(traceback.format_exception(error))
        context.journal.event("row_quarantined", row=str(row), deliveries=1, error=str(error))
        subject = table.cell(row, "quarantined")
        return subject, table.encode(subject, Quarantined(context.role, 1, str(error)[:2000], trace[-8000:]))


class PromptSource(StatefulRole):
    """Owns the admission of rows."""

    writes = "prompt"

    def setup(self) -> None:
        """Open the data and the tokenizer."""
        config = self.context.config
        self._source = open_data(config.data)
        tokenizer = Tokenizer(config.model_path)
        self._maker = PromptMaker(config.data, tokenizer, room(config), config.rollout.max_tokens)
        self._figures: dict[str, float] = {}
        self._ledger = Ledger(config.trainer.rows, config.run.steps, config.staleness.max)

    def follows(self) -> list[str]:
        """Rows as they begin and end, and what the trainer announces."""
        subjects = self.context.table.subjects
        columns = [subjects.column(name) for name in ("prompt", "dropped", "quarantined")]
        return columns + [subjects.numbered(kind, "*") for kind in ("batch", "weights", "checkpoint")]

    def recover(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Read the ledger again and go on."""
        self.on_cells(cells)

    def on_cells(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Keep the ledger; admit what may be admitted, drop what nobody will train."""
        for cell_id, cell in cells:
            observe(self._ledger, self.context, cell_id, cell)
        self._drop_surplus()
        while rows := self._ledger.to_admit()[:256]:
            self._admit(rows)
            self.progress()
        lead = self.context.config.staleness.max
        self._figures = self._measure()
        version = self._ledger.version
        self.context.waits_for("weights 0" if version is None else f"weights {version + 1} (lead {lead})")

    def _admit(self, rows: list[RowId]) -> None:
        table = self.context.table
        cells = [first_cell(self.context, row, partial(self._prompt, row)) for row in rows]
        table.put_encoded(cells)
        for subject, _ in cells:
            self._ledger.observe(table.subjects.parse(subject))

    def _prompt(self, row: RowId) -> Prompt:
        config = self.context.config
        index = task_index(config.run.seed, row, config.trainer.rows, len(self._source))
        return self._maker.make(
            self._source[index],
            seed=seed_of(config.run.seed, "row", row.step, row.index),
            min_version=max(0, row.step - config.staleness.max),
        )

    def _drop_surplus(self) -> None:
        table = self.context.table
        surplus = [table.cell(row, "dropped") for row in self._ledger.surplus()]
        if surplus:
            detail = "the step's batch was complete without it"
            table.put_all((subject, Dropped(DropReason.SURPLUS, detail)) for subject in surplus)
            for subject in surplus:
                self._ledger.observe(table.subjects.parse(subject))

    def metrics(self) -> dict[str, float]:
        """The ledger, as of the last cells."""
        return self._figures

    def _measure(self) -> dict[str, float]:
        account = self._ledger.account()
        return {
            "admitted": account.admitted,
            "trained": account.trained,
            "dropped": account.dropped,
            "quarantined": account.quarantined,
            "in_flight": account.in_flight,
            "version": -1 if self._ledger.version is None else self._ledger.version,
        }
