"""Ids of the special tokens of media, from the config of a model or else by name from its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from relax_actors.errors import ConfigError

NAMES = {
    "image": ("<|image_pad|>", "<|IMAGE|>"),
    "video": ("<|video_pad|>", "<|VIDEO|>"),
    "audio": ("<|audio_pad|>", "<|AUDIO|>"),
    "vision_start": ("<|vision_start|>", "<|vision_bos|>"),
    "vision_end": ("<|vision_end|>", "<|vision_eos|>"),
    "audio_start": ("<|audio_start|>", "<|audio_bos|>"),
    "audio_end": ("<|audio_end|>", "<|audio_eos|>"),
}
"""Names of each token in the tokenizers of the supported models."""


def token_ids(body: dict[str, Any], names: Iterable[str], where: str, folder: Path | None) -> dict[str, int]:
    """Return the ids of tokens by name.

    Raises:
        ConfigError: neither the config nor the tokenizer has one that the model cannot do without.
    """
    found = {}
    for name in names:
        keys = (f"{name}_token_id", f"{name}_token_index")
        value = next((body[key] for key in keys if isinstance(body.get(key), int)), None)
        if value is not None:
            found[name] = int(value)
    missing = [name for name in names if name not in found]
    if missing and folder is not None:
        known = _added_tokens(folder)
        found |= {name: known[text] for name in missing for text in NAMES[name] if text in known}
    for name in names:
        # Ends and starts stand in the text as they are; only placeholders and the starts of a span are looked for.
        if name not in found and not name.startswith(("audio_", "vision_end")):
            msg = f"{where} has no {name}_token_id, and the tokenizer no {NAMES[name][0]}; add one"
            raise ConfigError(msg)
    return found


def _added_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of a tokenizer's added tokens by their text."""
    found: dict[str, int] = {}
    try:
        if (path := folder / "tokenizer_config.json").exists():
            decoder = json.loads(path.read_text()).get("added_tokens_decoder", {})
            found |= {str(entry["content"]): int(key) for key, entry in decoder.items()}
        if not found and (path := folder / "tokenizer.json").exists():
            found |= {str(entry["content"]): int(entry["id"]) for entry in json.loads(path.read_text())["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{path} is not the file of a tokenizer: {type(error).__name__} {error}"
        raise ConfigError(msg) from error
    return found
