"""Tokens of an example and the mask of the trained ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.errors import RowError
from relax_actors.messages import ObservedMedia

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an example's text, and whether its tokens are trained.

    `is_answer` says that a stop token ends it: added to plain text; in a conversation the first stop token of
    the template, whose later tokens are not trained, since no generation reaches them.
    """

    text: str
    trained: bool
    is_answer: bool = False


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of an example.

    Attributes:
        ids: `[len] int32`.
        trained: `[len] bool`, which of them are trained, or of an answer that a reward model scores.
        is_cut: whether its beginning or end is cut off.
        observed: media and positions of all its tokens; None while each medium has one placeholder, and for a model of
            text alone.
        targets: `[len] float32`, what scores are compared with; NaN where no score is read. None for a model of tokens.
    """

    ids: Array
    trained: Array
    is_cut: bool = False
    observed: ObservedMedia | None = None
    targets: Array | None = None

    @property
    def mask(self) -> Array:
        """Tokens of the loss, `[len] bool`: trained tokens, or places of scores."""
        return self.trained if self.targets is None else ~np.isnan(self.targets)

    def since(self, begin: int) -> Example:
        """Return the tokens from `begin` on; raises RowError for an example with media."""
        if not begin:
            return self
        observed = self.observed
        if observed is not None and observed.media:
            msg = 'it has media, so that only its end can be cut off; set data.oversize = "truncate_right"'
            raise RowError(msg)
        if observed is not None:
            observed = replace(observed, positions=observed.positions[:, : len(self.ids) - begin])
        targets = None if self.targets is None else self.targets[begin:]
        return Example(self.ids[begin:], self.trained[begin:], is_cut=True, observed=observed, targets=targets)

    def pieces(self, most: int) -> list[Example]:
        """Divide an example into pieces of `most` tokens, without an untrained end.

        The first token of a piece is the last one of the piece before it, and trained there: each trained token is in
        one piece, behind at least one token. Pieces without a trained token are left out.

        Raises:
            RowError: the example has media.
        """
        examples = []
        for begin in range(0, len(self.ids) - 1, most - 1):
            piece = self.since(begin)
            trained = piece.trained[:most].copy()
            trained[0] = False
            if trained.any():
                end = int(np.flatnonzero(trained)[-1]) + 1
                examples.append(replace(piece.until(end, is_cut=False), trained=trained[:end]))
        return examples

    def until(self, end: int, *, is_cut: bool) -> Example:
        """Return the first `end` tokens, which end within no medium."""
        observed = self.observed
        if observed is not None:
            media = [medium for medium in observed.media if medium.start < end]
            observed = replace(observed, media=media, positions=observed.positions[:, :end])
        targets = None if self.targets is None else self.targets[:end]
        return Example(self.ids[:end], self.trained[:end], is_cut, observed, targets)


def end_between_media(ids: Array, observed: ObservedMedia, most: int) -> int:
    """Return how many tokens, up to `most`, an example may keep without cutting a medium."""
    for medium in observed.media:
        places = np.flatnonzero(ids == ids[medium.start])
        if medium.start < most <= places[places >= medium.start][medium.tokens - 1]:
            return medium.start
    return most
