"""The section [run]: name, length and folder of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from broker.subjects import check_name
from relax_actors.config.sections import NonNegativeInt, Positive, Section


class RunSection(Section):
    """[run]: name, length and folder of the run."""

    name: str = "run"
    """Part of every subject and path: letters, digits, `-`, `_`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of all random choices of the run."""
    steps: NonNegativeInt = 100
    """Number of optimizer steps."""
    epochs: Positive | None = None
    """Passes over the data, in place of `steps`: every row comes once a pass, in a new order. The last step has the
    rows that remain. Of `steps` and `epochs`, the shorter counts."""
    rows: Positive | None = None
    """Rows to train in a run with `epochs`, which follow from the data; not to be set."""
    folder: Path | None = None
    """Folder for everything that the run writes; `runs/<name>` if not set."""
    stage: str | None = None
    """Stage of a file with `[[stages]]`, whose name is appended to `name` and `folder`. Without it, `relax up` trains
    all stages, one after the other."""
    keep_steps: NonNegativeInt = 0
    """Newest steps that `relax replay` and `relax branch` can begin at: their rows stay in the table and the store, and
    so does a checkpoint at or before the first of them. 0 keeps what a resumption needs: the steps after the last
    checkpoint."""
    threads: Positive = 1
    """CPU threads of each actor's process. More than cores / busy actors slows all of them down."""
    deterministic: bool = False
    """Generate and score every row on its own, so that its numbers do not depend on what else is in flight."""

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        try:
            return check_name(value, "run name")
        except Exception as error:
            raise ValueError(str(error)) from error
