"""Times of the temporal patches of a video as text, as Qwen3-VL reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from relax_actors.errors import RowError


@dataclass(frozen=True, slots=True)
class Written:
    """Ids of a text that was added to a prompt, in place of its last `removed` ids."""

    ids: list[int]
    removed: int


class Timestamps:
    """Writes times after a prompt.

    Args:
        tokenizer: tokenizer of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.get_added_tokens_decoder())

    def after(self, prompt: Sequence[int], seconds: float) -> Written:
        """Return the ids of a time that follows a prompt.

        A tokenizer can merge the first characters with the text before them, so this text is written again.

        Raises:
            RowError: the tokenizer cannot write the time.
        """
        text = f"<{seconds:.1f} seconds>"
        ids = self._encode(text)
        if self._decode(ids) != text:
            msg = f"the model's tokenizer cannot write the timestamp {text!r} of a video; add its characters"
            raise RowError(msg)
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
