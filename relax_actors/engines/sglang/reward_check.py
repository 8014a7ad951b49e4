"""Check of a reward model that SGLang is to serve; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from relax_actors.data.nested_config import text_fields
from relax_actors.data.score_folder import ScoreFolder
from relax_actors.engines.sglang import presence
from relax_actors.errors import ConfigError

SCORE_CLASSES = {
    "Qwen2ForSequenceClassification": True,
    "Qwen3ForSequenceClassification": True,
    "LlamaForSequenceClassification": False,
}
"""Classes whose scores SGLang computes as transformers does, and whether SGLang gives the head a bias."""


def check_reward_model(model: Path, folder: ScoreFolder, setting: str) -> Iterator[str]:
    """Refuse a reward model that a server cannot hold, or computes otherwise.

    Args:
        model: its folder.
        folder: facts of the folder.
        setting: configuration key that chooses SGLang, with its value.
    """
    presence.require()
    if folder.of_steps:
        msg = f'{setting} reads one score at the last token, and {model} scores steps; set it to "torch"'
        raise ConfigError(msg)
    fields = json.loads((model / "config.json").read_text())
    if why := presence.difference(text_fields(fields)):
        msg = f'{setting}: {why}, or set it to "torch"'
        raise ConfigError(msg)
    name = fields["architectures"][0]
    if name not in SCORE_CLASSES or not presence.serves(name):
        known = ", ".join(SCORE_CLASSES)
        msg = f'{setting} serves reward models of the classes {known}, and {model} is a {name}; set it to "torch"'
        raise ConfigError(msg)
    yield f"a server of {model} for each actor"
