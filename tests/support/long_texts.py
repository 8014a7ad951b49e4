"""Texts that take long to tokenize, and a tokenizer for them."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

_UNITS = {"words": "hello world, say 7 again ", "one letter": "a", "Chinese": "你好世界", "emoji": "😀"}


def long_texts(size: int) -> dict[str, str]:
    """Texts of about a number of bytes, by what they repeat."""
    return {name: unit * (size // len(unit.encode())) for name, unit in _UNITS.items()}


def byte_tokenizer(folder: Path, context: int) -> Path:
    """Write a tokenizer of bytes, as those of most models are, and a model with this context."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["he", "ll", "hell", "hello"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    inner = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *words])}, merges))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    return folder
