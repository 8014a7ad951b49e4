"""Ids of the special tokens of media, from the config of a model or else by name from its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_actors.errors import ConfigError
from relax_actors.media.families.spec import FamilySpec


def token_ids(body: dict[str, Any], spec: FamilySpec, folder: Path) -> dict[str, int]:
    """Return the ids of a family's special tokens by role.

    Raises:
        ConfigError: neither the config nor the tokenizer has one that the model cannot do without.
    """
    ids: dict[str, int] = {}
    for role in spec.tokens:
        keys = (f"{role}_token_id", f"{role}_token_index")
        value = next((body[key] for key in keys if isinstance(body.get(key), int)), None)
        if value is not None:
            ids[role] = int(value)
    missing = spec.tokens.keys() - ids.keys()
    if missing:
        known = _added_tokens(folder)
        ids |= {role: known[spec.tokens[role]] for role in missing if spec.tokens[role] in known}
    for role, text in spec.tokens.items():
        # Ends and starts stand in the text as they are; only placeholders and the starts of a span are looked for.
        if role not in ids and not role.startswith(("audio_", "vision_end")):
            msg = f"{folder / 'config.json'} has no {role}_token_id, and the tokenizer no {text}; add one"
            raise ConfigError(msg)
    return ids


def _added_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of a tokenizer's added tokens by their text."""
    tokens: dict[str, int] = {}
    try:
        if (path := folder / "tokenizer_config.json").exists():
            decoder = json.loads(path.read_text()).get("added_tokens_decoder", {})
            tokens |= {str(entry["content"]): int(key) for key, entry in decoder.items()}
        if not tokens and (path := folder / "tokenizer.json").exists():
            added = json.loads(path.read_text())["added_tokens"]
            tokens |= {str(entry["content"]): int(entry["id"]) for entry in added}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{path} is not the file of a tokenizer: {type(error).__name__} {error}"
        raise ConfigError(msg) from error
    return tokens
