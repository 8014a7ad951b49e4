"""File of a checkpoint with the coefficients that adapt from step to step."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from relax_actors.algorithms.controllers import Coefficients

FILE = "coefficients.json"


def save_coefficients(folder: Path, coefficients: Coefficients) -> None:
    """Write the coefficients of the next step; JSON keeps every bit of a float."""
    (folder / FILE).write_text(json.dumps(asdict(coefficients)))


def load_coefficients(folder: Path) -> Coefficients:
    """Read the coefficients of the next step.

    Raises:
        OSError: the file is missing.
        ValueError: it is damaged.
        TypeError: it is damaged.
    """
    return Coefficients(**json.loads((folder / FILE).read_text()))
