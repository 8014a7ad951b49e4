"""Tokenizer of single characters, for models that start from random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from relax_actors.errors import ConfigError

PAD = "<pad>"
UNKNOWN = "<unknown>"


def make_character_tokenizer(
    alphabet: str, end: str, folder: Path, special: Mapping[str, str] = MappingProxyType({})
) -> dict[str, int]:
    """Write a tokenizer of characters and special tokens; return ids for config.json.

    The character `end` ends a sequence. The ids of `special`, texts of the tokens of media by role, follow that of the
    padding.

    Raises:
        ConfigError: a character occurs twice, or `end` is not one character of the alphabet.
    """
    twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if twice:
        msg = f"model.tokenizer.alphabet has {twice} more than once; write each character once"
        raise ConfigError(msg)
    if len(end) != 1 or end not in alphabet:
        msg = f"model.tokenizer.end {end!r} is not one character of the alphabet {alphabet!r}"
        raise ConfigError(msg)
    vocabulary = {token: i for i, token in enumerate([*alphabet, PAD, *special.values()])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([PAD, *special.values()])
    inner.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": PAD}
    if special:
        settings["extra_special_tokens"] = _names_in_transformers(special)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    ids = {"eos_token_id": vocabulary[end], "pad_token_id": vocabulary[PAD]}
    return ids | {"vocab_size": len(vocabulary)}


def _names_in_transformers(special: Mapping[str, str]) -> dict[str, str]:
    """Return a tokenizer's attributes with media tokens, for processors of transformers."""
    names = {f"{role}_token": text for role, text in special.items()}
    # Omni models call the start of a span "bos", and its end "eos".
    for role, text in special.items():
        span, _, side = role.partition("_")
        if side:
            names[f"{span}_{'bos' if side == 'start' else 'eos'}_token"] = text
    return names
