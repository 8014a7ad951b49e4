"""Folders of tiny judges with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_actors.data.model_folder import prepare
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.weights import files as weights
from tests.support.chat_folder import make_chat_folder
from tests.support.chat_templates import SMOLLM2
from tests.support.models import QWEN3, config_of

ALPHABET = '0123456789>#"\n'
TEMPLATE = '{prompt}"{response}"'
STOPS = ["<|im_end|>"]


def plain_judge(folder: Path, alphabet: str = ALPHABET, **changes: Any) -> Path:
    """Write a judge of single characters without a chat template; returns its folder."""
    config = config_of(
        folder / "run", QWEN3 | changes, model={"tokenizer": {"alphabet": alphabet}, "architecture": QWEN3 | changes}
    )
    prepare(config, folder)
    return _with_weights(folder)


def chat_judge(folder: Path, context: int = 2048) -> Path:
    """Write a judge that reads ChatML and writes printable characters; returns its folder."""
    make_chat_folder(folder, SMOLLM2, STOPS)
    tokenizer = Tokenizer(folder)
    body = QWEN3 | {"max_position_embeddings": context, "vocab_size": tokenizer.size}
    body |= {"eos_token_id": min(tokenizer.stop_ids), "bos_token_id": None, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(body))
    return _with_weights(folder)


def _with_weights(folder: Path) -> Path:
    """Add weights that are so large that distributions are far from uniform."""
    tensors = {name: 3 * tensor.detach() for name, tensor in tensors_of(build(folder, seed=7)).items()}
    weights.save(tensors, folder / "model.safetensors")
    return folder
