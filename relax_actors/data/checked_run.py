"""A run before its start, as the checks of its parts see it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from relax_actors.config import Config
from relax_actors.config.data import DataSection
from relax_actors.devices.inventory import NO_GPU, Inventory

if TYPE_CHECKING:
    from relax_actors.data.model_folder import ModelFacts
    from relax_actors.data.source import DataSource
    from relax_actors.data.tokenizer import Tokenizer
    from relax_actors.messages import Prompt


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """The model of a run: its folder, its size and shape, and its tokenizer."""

    folder: Path
    facts: ModelFacts
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """What a check may look at; see `relax_actors.runtime.Role.check`.

    Attributes:
        config: configuration of the run.
        here: roles whose actors start on this machine.
        inventory: GPUs of this machine that they may use.
        model: the model; None if it cannot be read, which is reported elsewhere.
        role: name of the role that is checked.
        first_rows: first usable row of each section with data, by its name, once the data is checked.
        opened: data sources that `source` has opened, by section.
    """

    config: Config
    here: Collection[str]
    inventory: Inventory = NO_GPU
    model: CheckedModel | None = None
    role: str = ""
    first_rows: dict[str, Prompt] = field(default_factory=dict)
    opened: dict[str, DataSource] = field(default_factory=dict)

    def source(self, data: DataSection) -> DataSource:
        """Open the source of a section, which may take long, or return the one that a check has opened.

        Raises:
            ConfigError: as `open_data`.
        """
        from relax_actors.data.prompt_maker import open_data  # noqa: PLC0415 roles import this module without data

        key = data.model_dump_json()
        if key not in self.opened:
            self.opened[key] = open_data(data, self.config.media)
        return self.opened[key]
