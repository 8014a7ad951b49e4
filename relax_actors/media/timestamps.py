"""Times of the temporal patches of a video as text, as some families read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from relax_actors.errors import RowError

_ALL_DIGITS = 1234567890.0


@dataclass(frozen=True, slots=True)
class Written:
    """Ids of a text that was added to a prompt, in place of its last `removed` ids."""

    ids: list[int]
    removed: int


def missing_characters(tokenizer: Tokenizer, template: str) -> str:
    """Return the characters of timestamps, or of another text, that a tokenizer lacks; empty if none."""
    written = template.format(seconds=_ALL_DIGITS)
    if writes(tokenizer, written):
        return ""
    return "".join(character for character in dict.fromkeys(written) if not writes(tokenizer, character))


def writes(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a tokenizer has tokens for all characters of a text."""
    try:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
    except Exception:  # noqa: BLE001 the Rust library raises bare Exception for text outside of the alphabet
        return False
    return bool(tokenizer.decode(ids, skip_special_tokens=False) == text)


class Timestamps:
    """Writes times after a prompt."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._special = set(tokenizer.get_added_tokens_decoder())

    def after(self, prompt: Sequence[int], seconds: float) -> Written:
        """Return the ids of a time that follows a prompt.

        A tokenizer can merge the first characters with the text before them, so this text is written again.

        Raises:
            RowError: the tokenizer cannot write the time.
        """
        text = self._template.format(seconds=seconds)
        if not writes(self._tokenizer, text):
            missing = missing_characters(self._tokenizer, self._template)
            msg = (
                f"the model's tokenizer cannot write the timestamp {text!r} of a video; add the characters of "
                f"{missing!r} to model.tokenizer.alphabet, or use the model's own tokenizer"
            )
            raise RowError(msg)
        ids = self._encode(text)
        count = next((n for n, token in enumerate(reversed(prompt)) if token in self._special), len(prompt))
        before = list(prompt[len(prompt) - count :])
        joined = self._decode(before)
        if not before or self._encode(joined) != before:
            return Written(ids, 0)
        both = self._encode(joined + text)
        same = next((n for n, (old, new) in enumerate(zip(before, both, strict=False)) if old != new), len(before))
        return Written(both[same:], len(before) - same)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
