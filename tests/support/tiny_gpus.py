"""Roles that write down which GPUs they were leased."""

from __future__ import annotations

import os
from pathlib import Path

from relax_actors import Role, Row


class OnGpus(Role):
    """Writes its process and its GPUs to a file for each actor."""

    reads = ("trajectory",)
    writes = "seen"

    def setup(self) -> None:
        path = Path(self.context.config.folder) / f"{self.context.role}.{self.context.n}.gpus"
        names = ("CUDA_VISIBLE_DEVICES", "RELAX_GPUS")
        new = path.with_suffix(".new")
        new.write_text("|".join([str(os.getpid()), *(os.environ.get(name, "unset") for name in names)]))
        new.rename(path)

    def handle(self, row: Row) -> int:
        return len(row.trajectory.samples)


class OnNone(OnGpus):
    """The same, with another column."""

    writes = "seen_too"
