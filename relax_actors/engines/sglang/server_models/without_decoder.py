"""Towers of transformers without the decoder behind them. Imports no SGLang."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModel, Qwen2_5OmniThinkerForConditionalGeneration


def towers_of(config: Any, dtype: torch.dtype) -> Any:
    """Return the model of a configuration without its decoder and head.

    Weights are of this dtype; tables of rotary angles stay in float32, as in the trainer.
    """
    small = copy.deepcopy(config)
    small.text_config.update({"num_hidden_layers": 0, "layer_types": [], "vocab_size": 1, "pad_token_id": None})
    if config.model_type == "qwen2_5_omni_thinker":
        model: Any = Qwen2_5OmniThinkerForConditionalGeneration._from_config(small, dtype=dtype)  # type: ignore[no-untyped-call]  # noqa: SLF001
        del model.model, model.lm_head
    else:
        model = AutoModel.from_config(small, dtype=dtype)  # type: ignore[no-untyped-call]
        del model.language_model
    return model
