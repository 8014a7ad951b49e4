"""Author of cells that share a segment; kills itself at a stage.

`python segment_author.py ADDRESS STORE RUN NUMBER segment|cells|end|collect`
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from broker.address import Address
from broker.connection import Connection
from broker.segment import INLINE_BYTES
from broker.store import Store
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.messages import Reward


def die() -> None:
    """End at once, like a process that is killed from outside."""
    os.kill(os.getpid(), signal.SIGKILL)


def collect(store: Store) -> None:
    """Begin to remove the steps before the last, and die meanwhile."""
    for step in range(59):
        store.remove_later(f"group/{step}")
    while (store.root / "group" / "5").exists():
        pass
    die()


def write(table: Table, number: int, stage: str) -> None:
    """Write the cells of four rows with one segment."""
    values = np.full(INLINE_BYTES // 4 + 1, number, np.float32)
    subjects = [table.subject(RowId(3, index), "reward") for index in range(4)]
    encoded = table.encode_all((subject, Reward(values)) for subject in subjects)
    if stage == "segment":
        die()
    cells = list(zip(subjects, encoded, strict=True))
    table.put_encoded(cells[:2])
    if stage == "cells":
        die()
    table.put_encoded(cells[2:])


def main() -> None:
    """Run up to the stage."""
    address, folder, run, number, stage = sys.argv[1:]
    store = Store(Path(folder))
    if stage == "collect":
        collect(store)
    connection = Connection(Address.load(Path(address)), "author")
    write(Table(connection, Subjects(run), store, f"author.0#{number}"), int(number), stage)
    connection.close()


if __name__ == "__main__":
    main()
