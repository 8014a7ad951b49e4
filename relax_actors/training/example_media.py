"""Media of examples: features, expanded tokens, rotary positions, and trained tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from broker.codec import Array
from broker.store import Store
from relax_actors.config import Config
from relax_actors.data.download import Downloads
from relax_actors.data.example import Example
from relax_actors.errors import RowError
from relax_actors.media import Expanded, Features
from relax_actors.messages import MediaSource, ObservedMedia
from relax_actors.training.media_preparer import MediaPreparer


class ExampleMedia:
    """Prepares the media of examples, once for all roles that compute with them.

    Args:
        config: configuration of a run whose model sees or hears.
        store: store of the run.
        progress: called between two media, and while a download goes on.

    Attributes:
        family: family of the model.
        folder: folder in the store that gets the features of the next examples; that of their step.

    Raises:
        ConfigError: the model is not supported, or the settings of [media] do not fit it.
    """

    def __init__(self, config: Config, store: Store, progress: Callable[[], None] = lambda: None) -> None:
        assert config.media is not None  # noqa: S101 of a model with media
        self._preparer, self._progress, self.folder = MediaPreparer(config, store), progress, ""
        self._downloads = Downloads(config.media, store, progress)
        self.family = self._preparer.family
        self._placeholders = [*self.family.kinds_by_id]

    def expand(self, example: Example, sources: Sequence[MediaSource]) -> Example:
        """Return an example in which each medium has all its placeholders, none of which is trained.

        It has one placeholder for each of `sources`, in order.

        Raises:
            RowError: a medium cannot be read or exceeds a limit, or the placeholders do not fit the media.
            StoreError: the store has lost a file that the data held itself.
        """
        for source in sources:
            if source.url:
                self._downloads.fetch(source)
        features, references = self._preparer.stored(sources, self.folder, self._progress)
        whole = self._preparer.expand_tokens(example.ids, features)
        trained = example.trained.copy()
        trained[np.isin(example.ids, self._placeholders)] = False
        mask = self._spread(example.ids, trained, features, whole)
        records = self._preparer.records(features, references, whole)
        return Example(whole.tokens, mask, observed=ObservedMedia(0, list(sources), records, whole.positions))

    def _spread(self, ids: Array, trained: Array, features: Sequence[Features], whole: Expanded) -> Array:
        """Return an expanded example's mask `[len] bool`; raises RowError for trained timestamps."""
        firsts = [n for n, one in enumerate(features) if not one.inside] + [len(features)]
        bounds = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
        mask, start = np.zeros(len(whole.tokens), np.bool_), 0
        for begin, end in pairwise(bounds):
            stop = len(whole.tokens)
            if end < len(ids):
                count = int(np.isin(ids[:end], self._placeholders).sum())
                stop = len(self._preparer.expand_tokens(ids[:end], features[: firsts[count]]).tokens)
            mask[start:stop], start = trained[begin], stop
        if not np.array_equal(whole.tokens[mask], ids[trained]):
            around = self.family.spec.around
            text = f"{around!r}, which the model reads around an image," if around else "the timestamp of a video"
            msg = (
                f"{text} joins the trained text beside it, so that their tokens cannot be told apart; "
                'train the answers alone, with examples.train = ["assistant"]'
            )
            raise RowError(msg)
        return mask
