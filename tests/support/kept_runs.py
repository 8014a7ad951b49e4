"""A finished run whose steps are kept, and faults that are planted in copies of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from broker.subjects import RowId
from relax_actors.messages import Advantage, Trajectory
from relax_actors.monitoring.connection import connected
from relax_actors.record.record import Record
from relax_actors.runtime import durable_folder
from tests.support.running import ON_POLICY, Run

KEPT = (*ON_POLICY, "run.keep_steps=100")
"""Settings of an on-policy run of which every step is kept."""
ENTROPIES = ("record.entropy=true", "record.every=1")
"""Settings of a run whose record has the entropy of each sampled token of all rows."""


def recorded_entropies(run: Run) -> dict[str, bytes]:
    """Return the entropies that the record of a run has of each trained row, as bytes; checks that there are some."""
    record, found = Record(run.folder.record), dict[str, bytes]()
    for row in record.rows("group"):
        trajectory = record.row(row).read("trajectory", Trajectory)
        sampled = trajectory.versions >= 0
        assert trajectory.entropies is not None, row
        assert trajectory.entropies.shape == trajectory.logprobs.shape
        assert trajectory.entropies[sampled].max() > 0
        assert not trajectory.entropies[~sampled].any()
        found[str(row)] = trajectory.entropies.tobytes()
    return found


def digests_of_files(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder, by relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def copy_of(run: Run, folder: Path) -> Path:
    """Copy a finished run, with a store of its own."""
    shutil.copytree(run.folder.root, folder)
    change_settings(folder, lambda config: config["run"].update(folder=str(folder)))
    return folder


def change_settings(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the saved configuration of a run."""
    body = json.loads((folder / "config.json").read_text())
    change(body["config"])
    (folder / "config.json").write_text(json.dumps(body))


def change_cell(folder: Path, row: RowId, column: str, change: Callable[[Any], Any]) -> None:
    """Replace a cell of a finished run by a changed one, which the server would refuse while the first is there."""
    kinds = {"trajectory": Trajectory, "advantage": Advantage}
    with connected(str(folder)) as at:
        subject = at.table.subject(row, column)
        cell = at.table.get(subject)
        assert cell is not None
        value = at.table.read(cell.data, kinds[column])
        at.table.remove([cell])
        assert at.table.put(subject, change(value))


def double_first_advantage(advantage: Advantage) -> Advantage:
    """Change one advantage of a row."""
    values = advantage.values.copy()
    values[0] = 2 * values[0] + 0.5
    return replace(advantage, values=values)


def flip_bit_of_a_log_prob(trajectory: Trajectory) -> Trajectory:
    """Change the lowest bit of one byte of a cell."""
    logprobs = trajectory.logprobs.copy()
    logprobs.view("uint8")[4] ^= 1
    return replace(trajectory, logprobs=logprobs)


def flip_bit_of_a_weight(checkpoint: Path, tensor: str, *, seal: bool) -> None:
    """Change one bit of a weight in the files of a checkpoint; `seal`: as if it had been written so."""
    for path in checkpoint.glob("model*.safetensors"):
        tensors = load_file(path)
        if tensor in tensors:
            tensors[tensor].view(-1).numpy().view("uint8")[2] ^= 1
            save_file(tensors, path)
    if seal:
        durable_folder.seal(checkpoint)
