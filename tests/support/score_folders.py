"""Folders of tiny reward models with random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from relax_actors.engines.torch.engine import TorchEngine
from tests.support.models import QWEN3, config_of


def score_folder(folder: Path, name: str = "reward_model", classes: int = 1, **examples: Any) -> Path:
    """Write the folder of a reward model of the tiny alphabet, with scores far from 0; returns it."""
    algorithm = {"name": name, "scores": {"classes": classes}}
    config = config_of(folder / "run", QWEN3, algorithm=algorithm, examples=examples)
    engine = TorchEngine(config)
    engine.initialise(11)
    with torch.no_grad():
        engine.model.score.weight.mul_(20)  # type: ignore[operator,union-attr]
    engine.export(folder / "model")
    shutil.copy(config.model_path / "tokenizer.json", folder / "model")
    return folder / "model"
