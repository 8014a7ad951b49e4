"""Check of the characters that the model reads from environments, tools and agents."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterator

from relax_actors.config import Config
from relax_actors.data.escapes import escape
from relax_actors.data.tokenizer import Tokenizer

USUAL = string.digits + string.ascii_letters + string.punctuation + " \n"
"""Characters of an ordinary error text."""


def check_characters(config: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """Note characters of ordinary texts that the tokenizer cannot encode, if the model reads what others write.

    Args:
        config: configuration of the run.
        tokenizer: tokenizer of the model.
    """
    if config.environment is None and config.gateway is None:
        return
    escapes = tokenizer.escapes
    if not (lacking := escapes.lacking(USUAL)):
        return
    ways = Counter(_way(character, escapes[ord(character)]) for character in lacking)
    done = ", ".join(f"{count} are {way}" for way, count in ways.items())
    yield (
        f"the tokenizer cannot encode {len(lacking)} of {len(USUAL)} usual characters ({_shown(lacking)}): where an "
        f"observation, an error text or an agent's message has one, {done}. Add them to model.tokenizer.alphabet, or "
        "use a tokenizer that encodes every byte"
    )


def _way(character: str, spelling: str) -> str:
    if not spelling:
        return "left out"
    return "escaped, as in \\x41" if spelling == escape(character) else f"replaced by {spelling!r}"


def _shown(characters: str) -> str:
    return repr(characters if len(characters) <= 12 else characters[:12] + "...")  # noqa: PLR2004
