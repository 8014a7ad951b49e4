"""Facts of the folder of a reward model, read without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from relax_actors.data.model_folder import measure, stored_shapes
from relax_actors.errors import ConfigError

HEAD = "score.weight"
ANSWERS, STEPS = "ForSequenceClassification", "ForTokenClassification"
STEP_SEPARATOR = "step_separator"
"""Field of config.json with the text behind each step, which a run that trains a process reward model writes."""


@dataclass(frozen=True, slots=True)
class ScoreFolder:
    """What a folder says of its reward model.

    Attributes:
        classes: number of scores.
        of_steps: whether it scores the steps of an answer.
        context_length: largest number of tokens of a prompt with an answer.
        parameters: number of parameters.
        separator: text behind each step; a line feed unless the folder says otherwise.
    """

    classes: int
    of_steps: bool
    context_length: int
    parameters: int
    separator: str = "\n"


def read_score_folder(folder: Path, setting: str) -> ScoreFolder:
    """Read a reward model's facts: a sequence or token classifier of transformers.

    Raises:
        ConfigError: it is no model folder, or its model has no linear head of scores.
    """
    facts = measure(folder, setting=setting)
    body = json.loads((folder / "config.json").read_text())
    names = [str(name) for name in body.get("architectures") or ["none"]]
    shapes = stored_shapes(folder)
    if not shapes:
        msg = (
            f"{setting} {folder} has no *.safetensors; name the folder of a trained reward model, as runs/reward/model"
        )
        raise ConfigError(msg)
    if not names[0].endswith((ANSWERS, STEPS)) or HEAD not in shapes:
        why = f"its architecture is {names[0]}" if not names[0].endswith((ANSWERS, STEPS)) else f"it has no {HEAD}"
        msg = (
            f"{setting} {folder} has no head of scores: {why}; name a folder that algorithm.name = "
            '"reward_model", "outcome_reward" or "process_reward" has trained, or another *ForSequenceClassification'
        )
        raise ConfigError(msg)
    separator = body.get(STEP_SEPARATOR)
    return ScoreFolder(
        shapes[HEAD][0],
        names[0].endswith(STEPS),
        facts.context_length,
        facts.parameters,
        separator if isinstance(separator, str) and separator else "\n",
    )
