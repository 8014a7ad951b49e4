"""Convert text to token ids and back, without torch."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from relax_actors.data.character_tokenizer import PAD
from relax_actors.data.escapes import Escapes
from relax_actors.data.nested_config import text_fields
from relax_actors.data.time_limit import call_within
from relax_actors.data.token_bytes import TokenBytes
from relax_actors.errors import ConfigError, RowError, SlowRowError, TooLongError

LOAD_SECONDS = 120.0
LONG_BYTES, LONG_SECONDS = 256 << 10, 60.0
"""Texts of more bytes are tokenized one at a time, since each takes seconds and 100 times its size in memory; time that
a text waits for its turn."""


class TemplateError(RowError):
    """A chat template refuses messages; `reason` is its text without the path."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Tokenizer:
    """The tokenizer of a model folder.

    Args:
        folder: the model folder.
        turn_seconds: seconds for which a long text waits until others have been tokenized.

    Attributes:
        replaced: metrics `characters_escaped` and `characters_dropped` of the texts given to `encode_any`; empty as
            long as all of them could be encoded.

    Raises:
        ConfigError: the folder has no readable tokenizer.json.
    """

    def __init__(self, folder: Path, turn_seconds: float = LONG_SECONDS) -> None:
        self._folder, self._turn_seconds = folder, turn_seconds
        path = folder / "tokenizer.json"
        try:
            self._inner = call_within(LOAD_SECONDS, lambda: tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the Rust library raises bare Exception
            msg = f"{path} is not a tokenizer: {error}; model.path must contain a Hugging Face tokenizer.json"
            raise ConfigError(msg) from error
        self.replaced: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._turn = threading.RLock()

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a completion, from generation_config.json and config.json."""
        stops: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            path = self._folder / name
            body = _json_object(path)
            ids = body.get("eos_token_id", text_fields(body).get("eos_token_id"))
            ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
            if wrong := [i for i in ids if type(i) is not int or i < 0]:
                msg = f"{path}: eos_token_id holds {wrong[0]!r:.80}, which is no token id; write a number or a list"
                raise ConfigError(msg)
            stops |= set(ids)
        return frozenset(stops)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self._inner)

    @cached_property
    def special_texts(self) -> list[str]:
        """Texts of the special tokens, the longest first."""
        added = self._inner.get_added_tokens_decoder().values()
        return sorted((str(token) for token in added if token.special), key=len, reverse=True)

    @property
    def stop_texts(self) -> list[str]:
        """Texts of the tokens of `stop_ids`."""
        return [str(self._inner.decode([i], skip_special_tokens=False)) for i in sorted(self.stop_ids)]

    @property
    def size(self) -> int:
        """Size of the vocabulary."""
        return int(self._inner.get_vocab_size())

    def difference(self, other: Tokenizer) -> str:
        """Describe the first difference of two vocabularies; empty if they are equal."""
        own, theirs = (t._inner.get_vocab() for t in (self, other))  # noqa: SLF001
        if own == theirs:
            return ""
        token = min(own.keys() ^ theirs.keys() or (t for t in own if own[t] != theirs[t]))
        ids = [f"id {known[token]}" if token in known else "missing" for known in (own, theirs)]
        return f"token {token!r} is {ids[0]} here, {ids[1]} there"

    def token_id(self, text: str) -> int | None:
        """Id of a text that is a single token; else None."""
        whole = self._inner.token_to_id(text)
        if whole is not None:
            return int(whole)
        try:
            ids = self._inner.encode(text, add_special_tokens=False).ids
        except Exception:  # noqa: BLE001 the Rust library raises bare Exception for text outside of the alphabet
            return None
        return int(ids[0]) if len(ids) == 1 else None

    @property
    def inner(self) -> tokenizers.Tokenizer:
        """The tokenizer of the Rust library."""
        return self._inner

    @cached_property
    def context_length(self) -> int | None:
        """Largest number of tokens that the model reads, by config.json; None if unknown."""
        length = text_fields(_json_object(self._folder / "config.json")).get("max_position_embeddings")
        return length if type(length) is int and length > 0 else None

    @cached_property
    def max_bytes(self) -> int | None:
        """Most bytes of text in the model's context, if all tokens were the longest."""
        if self.context_length is None:
            return None
        return self.context_length * max(len(token.encode()) for token in self._inner.get_vocab())

    def encode(self, text: str, *, special: bool = True) -> NDArray[np.int32]:
        """Token ids of a text, `[len] int32`; with `special`, also the model's usual ones.

        A text that cannot fit the model's context is refused before it is tokenized.

        Raises:
            TooLongError: the text has more bytes than the context of the model holds.
            SlowRowError: other long texts are being tokenized for `turn_seconds`.
            RowError: the tokenizer has no token for a part of it.
        """
        size = len(text.encode(errors="surrogatepass"))
        if self.max_bytes is not None and size > self.max_bytes:
            msg = (
                f"the text has {size} bytes, more than the {self.max_bytes} that the model's context of "
                f"{self.context_length} tokens holds at most; shorten it"
            )
            raise TooLongError(msg)
        with self._turn_of(size):
            try:
                # `encode` of one text holds the GIL until it is done, and with it all signs of life of the process.
                (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=special)
            except Exception as error:  # the Rust library raises bare Exception
                why = self._unknown_character(text) or f"{text[:80]!r} cannot be tokenized: {error}"
                raise RowError(why) from error
        return np.asarray(encoding.ids, np.int32)

    @contextmanager
    def _turn_of(self, size: int) -> Iterator[None]:
        """Wait until a text of this size may be tokenized; raises SlowRowError."""
        if size <= LONG_BYTES:
            yield
            return
        try:
            if not self._turn.acquire(timeout=self._turn_seconds):
                msg = (
                    f"a text of {size} bytes was not tokenized: others have taken {self._turn_seconds:g} s; shorten it"
                )
                raise SlowRowError(msg)
            yield
        finally:
            # `call_within` may interrupt the call of `acquire` as it succeeds. Only an owner can release the lock.
            with suppress(RuntimeError):
                self._turn.release()

    def encode_any(self, text: str, *, special: bool = True) -> NDArray[np.int32]:
        """Token ids of a foreign text, `[len] int32`, such as an observation.

        Characters that the tokenizer cannot encode are spelled in another way (see `relax_actors.data.escapes`) and
        counted in `replaced`.

        Raises:
            TooLongError, SlowRowError: as of `encode`.
            RowError: the tokenizer has tokens for the characters, but not for the words that they form.
        """
        try:
            return self.encode(text, special=special)
        except (TooLongError, SlowRowError):
            raise
        except RowError:
            spelled = self.escapes.spell(text)
            ids = self.encode(spelled.text, special=special)
            with self._counting:
                self.replaced.update(characters_escaped=spelled.escaped, characters_dropped=spelled.dropped)
            return ids

    @cached_property
    def escapes(self) -> Escapes:
        """Spellings of the characters that the tokenizer cannot encode."""
        return Escapes(self._encodes, map(str, self._inner.get_added_tokens_decoder().values()))

    def _encodes(self, text: str) -> bool:
        try:
            self._inner.encode(text, add_special_tokens=False)
        except Exception:  # noqa: BLE001 the Rust library raises bare Exception
            return False
        return True

    def _unknown_character(self, text: str) -> str:
        """Name the first character that a character tokenizer lacks; empty if none."""
        known = self._inner.get_vocab()
        if any(len(token) > 1 and token != PAD and not token.startswith("<|") for token in known):
            return ""
        at = next((at for at, character in enumerate(text) if character not in known), None)
        if at is None:
            return ""
        start = max(0, at - 20)
        return (
            f"character {text[at]!r} at position {at + 1} of {text[start : start + 60]!r} is not in the model's "
            "alphabet; add it to model.tokenizer.alphabet, or correct the row"
        )

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Text of token ids, without special and stop tokens."""
        ids = [int(t) for t in tokens if int(t) not in self.stop_ids]
        return str(self._inner.decode(ids, skip_special_tokens=True))

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether the folder has a chat template."""
        if (self._folder / "chat_template.jinja").exists():
            return True
        return "chat_template" in _json_object(self._folder / "tokenizer_config.json")

    @cached_property
    def chat_template(self) -> str:
        """Text of the chat template; empty if the folder has none."""
        path = self._folder / "chat_template.jinja"
        if path.exists():
            return path.read_text()
        template = _json_object(self._folder / "tokenizer_config.json").get("chat_template", "")
        return template if isinstance(template, str) else json.dumps(template)

    def spell(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Text of token ids with its special tokens, but without the stop token at its end."""
        ids = [int(token) for token in tokens]
        ids = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return str(self._inner.decode(ids, skip_special_tokens=False))

    def chat(self, messages: list[dict[str, Any]], *, asks: bool = True, **variables: Any) -> str:
        """Messages formatted by the chat template.

        The template is code of the model's author. Jinja's sandbox gives it no access to files or modules.

        Args:
            messages: `role`, `content` and what else the template reads.
            asks: whether the prompt for the model's answer follows.
            variables: further variables of the template, such as `tools`.

        Raises:
            ConfigError: the tokenizer's files cannot be loaded.
            TemplateError: the template refuses the messages.
        """
        formatter = self.formatter
        try:
            return str(formatter.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks, **variables))
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            msg = f"the chat template of {self._folder} raised {reason}; correct the messages, or set data.chat = false"
            raise TemplateError(msg, reason) from error

    @cached_property
    def formatter(self) -> Any:
        """Transformers' tokenizer with the chat template; raises ConfigError."""
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 a second to import, only for chats

        try:
            return PreTrainedTokenizerFast.from_pretrained(self._folder)
        except Exception as error:
            msg = (
                f"the tokenizer of {self._folder} cannot be loaded by transformers ({type(error).__name__}: {error}); "
                "fix tokenizer_config.json, or set data.chat = false"
            )
            raise ConfigError(msg) from error


def _json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object of the model folder, empty if missing; raises ConfigError."""
    if not path.exists():
        return {}
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{path} cannot be read ({type(error).__name__}: {error}); download the model again"
        raise ConfigError(msg) from error
    if not isinstance(body, dict):
        msg = f"{path} holds a {type(body).__name__}, not an object; download the model again"
        raise ConfigError(msg)
    return body
