"""GPTModel of megatron-core that reads media: towers of transformers in front of its first pipeline stage.

The embeddings of placeholder tokens are replaced by those of the towers, whose work the ranks of the model share.
Qwen3's towers also give features for the output of the first layers (deepstack).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.engines.megatron.mcore.attention import BatchParams, chunk_positions
from relax_actors.engines.megatron.mcore.batch_media import MicroBatchMedia
from relax_actors.engines.megatron.mcore.shared_towers import SharedTowers
from relax_actors.engines.torch.multimodal import Placement
from relax_actors.engines.torch.towers import Encoded


class MediaModel(GPTModel):  # type: ignore[misc]
    """Model chunk of a multimodal model.

    Args:
        towers: towers without decoder on the first pipeline stage, None on others.
        arguments: arguments of GPTModel.

    Attributes:
        towers: the towers, whose weights are those of this model.
        shared: how ranks compute with them; set before the first forward pass.
    """

    shared: SharedTowers | None = None

    def __init__(self, *arguments: Any, towers: PreTrainedModel | None, **settings: Any) -> None:
        # Features replace whole embeddings, so these are scattered over the ranks afterwards.
        super().__init__(*arguments, scatter_embedding_sequence_parallel=False, **settings)
        self.towers = towers
        for layer in self.decoder.layers if towers is not None else ():
            layer.register_forward_hook(_add_deepstack, with_kwargs=True)

    def train(self, mode: bool = True) -> MediaModel:  # noqa: FBT001, FBT002 torch's signature
        """Set the mode of the decoder; towers never train with dropout."""
        super().train(mode)
        if self.towers is not None:
            self.towers.train(mode=False)
        return self

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        packed_seq_params: BatchParams,
        **settings: Any,
    ) -> Tensor:
        """Logits or activations, as GPTModel; the media are in `packed_seq_params`."""
        if self.pre_process:
            settings["decoder_input"] = self._embed(input_ids, packed_seq_params)
        found: Tensor = super().forward(
            input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params, **settings
        )
        return found

    def _embed(self, tokens: Tensor, batch: BatchParams) -> Tensor:
        """Embeddings `[seq, rows, hidden]` of this rank's part of the sequences, with those of media in their places.

        Args:
            tokens: `[rows, length / context] int64`.
            batch: media of the micro-batch.
        """
        embedded: Tensor = self.embedding(input_ids=tokens, position_ids=None)
        placement = None if batch.media is None else _own_placement(batch.media)
        if placement is None or self.shared is None:
            return self._scatter(embedded)
        media = placement.media
        encoded = self.shared.encode(media) if batch.ahead is None else batch.ahead.encoded(media)
        given = encoded.embeddings.index_select(0, placement.source).to(embedded.dtype)
        shape, flat = embedded.shape, embedded.flatten(0, 1)
        embedded = self._scatter(flat.index_copy(0, placement.target, given).view(shape))
        deepstack = [self._scatter(layer.view(shape)) for layer in _laid_out(flat, placement, encoded)]
        if not any(layer.requires_grad for layer in deepstack):
            batch.deepstack = tuple(deepstack)
            return embedded
        leaves = [layer.detach().requires_grad_() for layer in deepstack]
        batch.deepstack = tuple(leaves)
        found: Tensor = _Collect.apply(leaves, embedded, *deepstack)  # type: ignore[no-untyped-call]
        return found

    def _scatter(self, whole: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return whole
        found: Tensor = scatter_to_sequence_parallel_region(whole)
        return found


def _own_placement(media: MicroBatchMedia) -> Placement | None:
    """Placement in the tokens `[length / context, rows]` of this context-parallel rank; None without media."""
    placement, (rows, length) = media.placement, media.positions.shape[1:]
    if placement is None:
        return None
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    target, held = placement.target, torch.arange(length, device=placement.target.device)
    if ranks > 1:
        held = chunk_positions(length, ranks, rank, target.device)
    place = held.new_full((length,), -1).index_copy(0, held, torch.arange(len(held), device=held.device))
    column = place[target % length]
    own = torch.nonzero(column >= 0)[:, 0]
    local = column[own] * rows + (target // length)[own]
    return Placement(placement.media, local, placement.source[own], placement.visual[own])


def _laid_out(embedded: Tensor, placement: Placement, encoded: Encoded) -> list[Tensor]:
    """Features of each deepstack layer in their places among the embeddings, `[tokens, hidden]`, 0 elsewhere."""
    target, source = placement.target[placement.visual], placement.source[placement.visual]
    zeros = torch.zeros_like(embedded)
    return [zeros.index_copy(0, target, layer.index_select(0, source).to(zeros.dtype)) for layer in encoded.deepstack]


def _add_deepstack(layer: Any, _: Any, settings: dict[str, Any], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Add the features of a layer to its output; also when its activations are recomputed."""
    deepstack, number = settings["packed_seq_params"].deepstack, layer.layer_number - 1
    if number >= len(deepstack):
        return output
    hidden, context = output
    return hidden + deepstack[number], context


class _Collect(torch.autograd.Function):
    """Identity of the embeddings whose backward pass also returns the gradients that deepstack leaves collected.

    Recomputed activations are differentiated layer by layer, each in a backward pass of its own. The features of all
    layers come from the same towers, whose graph can be traversed only once: at the end, with the embeddings.
    """

    @staticmethod
    def forward(context: Any, leaves: list[Tensor], embedded: Tensor, *_: Tensor) -> Tensor:
        context.leaves = leaves
        return embedded.view_as(embedded)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, gradients[0], *(leaf.grad for leaf in context.leaves)
