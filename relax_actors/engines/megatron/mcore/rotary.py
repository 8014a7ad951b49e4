"""Rotary embeddings of packed sequences, by one position a token or by the three of multimodal models.

Frequencies of a scaling (linear, llama3, YaRN) are those of transformers: megatron-core has some, with other settings.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from relax_actors.engines.megatron.families import Architecture
from relax_actors.engines.megatron.mcore import ON_CPU
from relax_actors.engines.megatron.mcore.attention import BatchParams, chunk_positions


class PackedRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]
    """Rotary embedding whose positions restart at 0 in each packed sequence, or are given.

    Args:
        architecture: of the model.
        settings: other arguments of megatron-core's class.
    """

    def __init__(self, architecture: Architecture, **settings: Any) -> None:
        rotary = architecture.rotary
        fraction, base = rotary["partial_rotary_factor"], float(rotary["rope_theta"])
        super().__init__(architecture.head_dim, rotary_percent=fraction, rotary_base=base, **settings)
        self._axes, self._is_latent = axes_of(architecture), architecture.latent is not None
        if is_scaled(architecture):
            device = "cpu" if ON_CPU else torch.cuda.current_device()
            self.inv_freq = _scaled(architecture)[0].to(device)

    def get_rotary_seq_len(
        self, context: Any, transformer: Any, tensor: Any, config: Any, batch: BatchParams | None = None, **_: Any
    ) -> Any:
        """Argument for `forward`: the layout of the micro-batch, or the length of rows with positions from 0 on."""
        if batch is not None and (batch.packing is not None or self._axes is not None):
            return batch
        return super().get_rotary_seq_len(context, transformer, tensor, config)

    def forward(self, length: Any, **settings: Any) -> Any:
        """Rotation angles, `[seq, 1 or rows, 1, head_dim] float32`; of packed latent attention `[seq, 1, head_dim]`."""
        if not isinstance(length, BatchParams):
            return super().forward(length, **settings)
        if length.media is not None and self._axes is not None:
            return self._angles(length.media.positions, self._axes)
        packing: Any = length.packing  # there is one; see `get_rotary_seq_len`
        angles = self.get_emb(packing.longest)[packing.positions[0]]
        return angles[:, 0] if self._is_latent else angles

    def _angles(self, positions: Tensor, axes: Tensor) -> Tensor:
        """Rotation angles of this rank's tokens; positions are `[3, rows, length]`."""
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        if ranks > 1:
            positions = positions[..., chunk_positions(positions.shape[-1], ranks, rank, positions.device)]
        by_frequency = positions[axes.to(positions.device)].permute(2, 1, 0)
        angles = by_frequency * self.inv_freq.to(positions.device)
        return torch.cat([angles, angles], -1)[:, :, None]


def is_scaled(architecture: Architecture) -> bool:
    """Whether the positions of a model are scaled to a longer context."""
    return architecture.rotary["rope_type"] in ROPE_INIT_FUNCTIONS


def softmax_scale(architecture: Architecture) -> float | None:
    """Factor of the scores of attention; None for 1 / sqrt(head_dim), or where latent attention has its own.

    transformers multiplies turned queries and keys by the attention factor of YaRN; here their products are multiplied.
    """
    if architecture.latent is not None or not is_scaled(architecture):
        return None
    factor = _scaled(architecture)[1]
    return None if factor == 1 else factor**2 / architecture.head_dim**0.5


def _scaled(architecture: Architecture) -> tuple[Tensor, float]:
    """Frequencies and attention factor."""
    config = LlamaConfig(
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.heads,
        head_dim=architecture.head_dim,
        max_position_embeddings=architecture.context_length,
        rope_parameters=dict(architecture.rotary),
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[architecture.rotary["rope_type"]](config, torch.device("cpu"))
    return frequencies, float(factor)


def axes_of(architecture: Architecture) -> Tensor | None:
    """Axis of the positions that each frequency turns by, `[head_dim / 2] int64`; None if all turn by one position."""
    sections = architecture.rotary_sections
    if not sections:
        return None
    if not architecture.rotary_interleaved:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    axes = torch.zeros(architecture.head_dim // 2, dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
