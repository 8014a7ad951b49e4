"""Tokenizer folders of single characters with a chat template and its special tokens."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

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
