"""Token ids that a multimodal model never samples: placeholders of media, and the tokens around them.

A sampled placeholder has no medium and would break every later forward pass. The ids are cut out of the distribution
where a token is sampled and wherever its log-prob is computed, so that all log-probs belong to the same distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_actors.media.family import Family


class BarredIds:
    """Cuts the barred ids of a family, if any, out of logits.

    `shard` are the token ids of the logits' columns; None for the whole vocabulary. `ids` `[ids] int64` are the columns
    of the barred ids, None if no id is barred.
    """

    def __init__(self, family: Family | None, device: torch.device, shard: range | None = None) -> None:
        ids = () if family is None else family.barred
        if shard is not None:
            ids = tuple(token - shard.start for token in ids if token in shard)
        self.ids = torch.tensor(ids, dtype=torch.long, device=device) if ids else None

    def cut(self, logits: Tensor) -> Tensor:
        """Set the logits `[..., vocab]` of barred ids to -inf, in place, and return them."""
        return logits if self.ids is None else logits.index_fill_(-1, self.ids, float("-inf"))
