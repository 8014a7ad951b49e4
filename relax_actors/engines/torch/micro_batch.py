"""Tensors of a micro-batch of packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from relax_actors.engines.torch.multimodal import Placement
from relax_actors.engines.torch.packing import Packing


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Concatenated sequences, in the order of their plan, each up to the token before its last trained one.

    Losses get the trained tokens of each sequence only, padded to `[batch, width]`.

    Attributes:
        tokens: `[1, total] int64`; a prefix that sequences share stands once.
        packing: layout of the sequences in `tokens`.
        scored: `[trained] int64`, index in `tokens` of the token before each trained token.
        targets: `[trained, 1] int64`, the trained tokens.
        places: `[trained] int64`, index of each trained token in the padded layout `[batch * width]`.
        mask: `[batch, width] bool`, true for trained tokens, false for padding.
        experts: `[moe_layers, total, experts_per_token] int64`, recorded experts; None unless all sequences have them.
        positions: `[3, 1, total] int64`, rotary positions of a multimodal model; None for a model that reads text only.
        placement: places of media in `tokens`; None without media.
    """

    tokens: Tensor
    packing: Packing
    scored: Tensor
    targets: Tensor
    places: Tensor
    mask: Tensor
    experts: Tensor | None = None
    positions: Tensor | None = None
    placement: Placement | None = None

    @property
    def width(self) -> int:
        """Largest number of trained tokens of a sequence."""
        return self.mask.shape[1]
