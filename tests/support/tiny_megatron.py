"""Tiny models for the tests of the Megatron engine, and a skip where Megatron-Core is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_actors.config import Config
from relax_actors.engines.megatron import installation
from relax_actors.errors import ConfigError
from tests.support import models
from tests.support.models import QWEN3, qwen3_moe
from tests.support.tiny_media_models import architecture_of

DENSE = QWEN3 | {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = DENSE | {"model_type": "llama", "head_dim": 8, "tie_word_embeddings": False}
MOE = qwen3_moe(DENSE)
SPLIT = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
"""What two tensor-parallel ranks or two pipeline stages can share."""


def media_architecture(model_type: str) -> dict[str, Any]:
    """Return `model.architecture` of a multimodal family that two ranks can share."""
    found = architecture_of(model_type)
    text = found["text_config"] | SPLIT
    if text.get("rope_parameters", {}).get("mrope_section") == [2, 3, 3]:
        # Queries, keys and values have the width of the model.
        text |= {"head_dim": 8, "rope_parameters": text["rope_parameters"] | {"mrope_section": [2, 1, 1]}}
    return found | {"text_config": text}


def skip_if_missing() -> None:
    """Skip a module's tests where Megatron-Core is not installed."""
    try:
        installation.require()
    except ConfigError as error:
        pytest.skip(str(error), allow_module_level=True)


def ranks_of(section: dict[str, Any], ranks: int = 2) -> dict[str, Any]:
    """Return settings of [trainer] from those of [trainer.megatron] and `recompute`, for a number of ranks."""
    layout = {name: value for name, value in section.items() if name != "recompute"}
    return {"megatron": {"ranks": ranks, **layout}, "recompute": section.get("recompute", "none")}


def config_of(folder: Path, architecture: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """Configure a run with a tiny model, as `tests.support.models.config_of` does."""
    trainer = {"backend": "megatron", "learning_rate": 1e-2, "max_tokens_per_microbatch": 64}
    return models.config_of(folder, architecture, trainer=trainer | sections.pop("trainer", {}), **sections)
