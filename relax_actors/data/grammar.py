"""Grammars that answers follow: the tokens that may come next, for one tokenizer.

A grammar is a text in llguidance's dialect of Lark, so that it travels as plain data. Clients write the schemas in it,
so its size and the work to compile it have limits. llguidance has a wheel of 8 MB and no dependencies; xgrammar needs
triton (1 GB) on Linux.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import ConfigError, RowError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64
"""Compiled grammars that are kept."""
_NOTHING = "no token of the vocabulary continues it"


class GrammarError(RowError):
    """A grammar that cannot be compiled, or that no token of the vocabulary continues."""


class Grammars:
    """Compiles grammars, and keeps them. For any thread.

    The tokenizer's stop tokens end an answer whose grammar is complete. `size` is that of the model's vocabulary, if
    larger.
    """

    def __init__(self, tokenizer: Tokenizer, size: int = 0) -> None:
        self._tokenizer, self._size = tokenizer, max(size, tokenizer.size)
        self._lock = threading.Lock()
        self._compiled = lru_cache(maxsize=KEPT)(self._compile)
        self._loaded: LLTokenizer | None = None

    def begin(self, grammar: str) -> GrammarState:
        """Return the state before the first token of an answer.

        Raises:
            GrammarError: the grammar is malformed, too large, or allows no answer.
            ConfigError: llguidance is not installed, or the model has no stop token.
        """
        return GrammarState(self.compile(grammar).deep_copy(), self._tokenizer.stop_ids)

    def compile(self, grammar: str) -> LLMatcher:
        """Return llguidance's state before the first token, to be copied; see `begin`."""
        # Without the lock: an engine that begins a compiled grammar does not wait for another that is being compiled.
        return self._compiled(grammar, self.vocabulary)

    def _compile(self, grammar: str, vocabulary: LLTokenizer) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 as in `_load`

        # About 20 ms for regular expressions, and 20 ms for a token; lexemes are not tried on the whole vocabulary.
        limits = LLParserLimits(
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_lexer_states=50_000,
            max_grammar_size=200_000,
            precompute_large_lexemes=False,
        )
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        GrammarState(matcher.deep_copy(), self._tokenizer.stop_ids).allowed()
        return matcher

    @property
    def vocabulary(self) -> LLTokenizer:
        """The vocabulary; raises ConfigError without llguidance or a stop token."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def _load(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415 needed by requests with a grammar alone
        except ImportError as error:
            msg = f"answers in a given form need llguidance ({error}); pip install 'relax-actors[gateway]'"
            raise ConfigError(msg) from error
        stops = sorted(self._tokenizer.stop_ids)
        if not stops:
            msg = "the model has no stop token to end an answer in a given form; set eos_token_id in its config.json"
            raise ConfigError(msg)
        try:
            return LLTokenizer(self._tokenizer.inner.to_str(), n_vocab=self._size, eos_token=stops)
        except ValueError:  # neither a byte-level vocabulary nor one with byte fallback
            return LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer, self._size)), eos_token=stops)


class GrammarState:
    """An answer so far, and what may follow it. For one thread."""

    def __init__(self, matcher: LLMatcher, stops: frozenset[int]) -> None:
        self._matcher, self._stops = matcher, stops
        self.is_over = False
        """Whether a stop token has ended the answer."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return the tokens that may follow, `[vocab] bool`; raises GrammarError."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarError(_reason(self._matcher.get_error()))
        mask = np.unpackbits(bits, bitorder="little").astype(np.bool_)
        if not mask.any():
            raise GrammarError(_NOTHING)
        return mask

    def advance(self, token: int) -> None:
        """Add a token; raises GrammarError if the token may not follow."""
        if token in self._stops and self._matcher.is_accepting():
            self.is_over = True
        elif not self._matcher.consume_token(token):
            raise GrammarError(_reason(self._matcher.get_error()))


class _Vocabulary:
    """A vocabulary whose decoder llguidance does not know, such as one of single characters."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.inner.get_added_tokens_decoder()
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = sorted(tokenizer.stop_ids.union(i for i, token in added.items() if token.special))
        self.eos_token_id, self.bos_token_id = min(tokenizer.stop_ids), None

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text; none if they would not spell it."""
        try:
            tokens: list[int] = self._tokenizer.encode(text.decode(errors="replace"), special=False).tolist()
        except RowError:
            return []
        return tokens if b"".join(self.tokens[token] for token in tokens) == text else []


def _reason(error: str) -> str:
    """Return the first line of llguidance's error, which continues with the grammar."""
    line = error.strip().partition("\n")[0]
    if line.startswith("NoExtension"):
        return _NOTHING
    return line.rpartition("failed to compile JSON schema: ")[2][:300]
