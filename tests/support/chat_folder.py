"""Tokenizer folders with a chat template and its special tokens, of single characters or of words."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

SPECIAL = re.compile(r"<[|\uff5c][^|\uff5c{}\n]+[|\uff5c]>|</?(?:s|think|bos|eos|start_of_turn|end_of_turn)>")
"""Special tokens in the text of a template."""


def make_chat_folder(folder: Path, template: str, stops: Sequence[str], unknown: str = "\x0b") -> Path:
    """Write the tokenizer of a template whose answers end with one of `stops`; returns the folder.

    Characters that are not printable ASCII become the token `unknown`; without such a token they cannot be encoded.
    """
    special = sorted({*SPECIAL.findall(template), *stops})
    vocabulary = {token: i for i, token in enumerate([*string.printable, *special])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(special)
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": stops[0], "bos_token": special[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [vocabulary[stop] for stop in stops]}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def make_word_folder(folder: Path, template: str, stops: Sequence[str], texts: Sequence[str]) -> Path:
    """Write a byte-level tokenizer like those of real models, with words of `texts`; returns the folder.

    Special tokens are those of the template; the marks of tool calls and reasoning are tokens that are no special ones.
    """
    special = sorted({*SPECIAL.findall(template), *stops} - {"<think>", "</think>"})
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    inner.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in marks])
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": stops[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = [inner.token_to_id(stop) for stop in stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    (folder / "chat_template.jinja").write_text(template)
    return folder
