"""What a teacher reads in place of a prompt: the hint of `roles.teacher.hint`."""

from __future__ import annotations

from string import Formatter

import numpy as np

from broker.codec import Array
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError
from relax_actors.messages import Prompt


def hinted_tokens(tokenizer: Tokenizer, hint: str, prompt: Prompt) -> Array:
    """Return the tokens of a hint with the prompt in it, `[len] int32`.

    Args:
        tokenizer: of student and teacher.
        hint: text with {prompt}, and with {answer} and names of the row's metadata where it needs them.
        prompt: prompt of the row.

    Raises:
        RowError: the row has no metadata of a name, or the text cannot be encoded.
    """
    known = {**prompt.metadata, "prompt": prompt.text, "answer": prompt.answer}
    parts = [(literal, name) for literal, name, _, _ in Formatter().parse(hint)]
    names = {name for _, name in parts if name is not None}
    if missing := sorted(names - known.keys()):
        msg = f"roles.teacher.hint names {missing}, which the row's metadata lacks; it has {sorted(known)}"
        raise RowError(msg)
    text = "".join(literal + str(known[name] if name else "") for literal, name in parts)
    # A prompt of a chat template was encoded without the special tokens that the model adds to plain text.
    is_plain = np.array_equal(tokenizer.encode(prompt.text), prompt.tokens)
    return tokenizer.encode(text, special=is_plain)
