"""Text that a family reads before and behind every image, written into the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

from relax_actors.errors import RowError
from relax_actors.media.timestamps import missing_characters, writes


def with_text_around(ids: Sequence[int], marks: Collection[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a prompt with `text` before and behind each of the tokens `marks`.

    Processors write the text before they tokenize, and a tokenizer can merge its first and last characters with what
    stands beside it. So the text between two special tokens is tokenized again where one of them is a mark.

    Raises:
        RowError: the tokenizer cannot write the text.
    """
    if not writes(tokenizer, text):
        msg = (
            f"the model reads {text!r} around an image, and its tokenizer cannot write it; add the characters of "
            f"{missing_characters(tokenizer, text)!r} to model.tokenizer.alphabet, or use the model's own tokenizer"
        )
        raise RowError(msg)
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special} | {*marks}
    written, run, before = list[int](), list[int](), ""
    for token in (*ids, None):
        if token is not None and token not in special:
            run.append(token)
            continue
        after = text if token in marks else ""
        written += _surrounded(run, before, after, tokenizer) + ([] if token is None else [token])
        run, before = [], after
    return written


def _surrounded(run: list[int], before: str, after: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a run between two texts; ids that no text is tokenized to stay as they are."""
    if not before and not after:
        return run
    own = str(tokenizer.decode(run, skip_special_tokens=False))
    if _encoded(own, tokenizer) == run:
        return _encoded(before + own + after, tokenizer)
    return [*_encoded(before, tokenizer), *run, *_encoded(after, tokenizer)]


def _encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
