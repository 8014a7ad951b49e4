"""The tokens and strings that end a sample."""

from __future__ import annotations

from collections.abc import Sequence

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import StopStrings
from relax_actors.errors import ConfigError, RowError


def stops_of(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[frozenset[int], StopStrings | None]:
    """Return the tokens that end a sample, and the stop strings `texts`.

    A stop string that is a token is among both: it is not sampled before rollout.min_tokens, and a server ends a sample
    without delay at a token.

    Raises:
        ConfigError: a stop string cannot be sampled.
    """
    if not texts:
        return tokenizer.stop_ids, None
    for text in texts:
        try:
            tokens = tokenizer.encode(text, special=False).tolist()
        except RowError:
            tokens = []
        if StopStrings([text], tokenizer.token_bytes).find(tokens) is None:
            msg = f"rollout.stop {text!r} cannot be written with the tokens of this model; choose a string that can"
            raise ConfigError(msg)
    ids = {token for text in texts if (token := tokenizer.token_id(text)) is not None}
    return tokenizer.stop_ids | ids, StopStrings(texts, tokenizer.token_bytes)
