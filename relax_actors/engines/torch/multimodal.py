"""Forward pass of multimodal transformers models, with features and positions that were computed beforehand.

The towers, the decoder and the head are called one by one, because the model's own `forward` computes positions from
state of earlier calls, cannot share a medium among sequences, and takes any placeholder token for a medium.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.engines.protocols.media import PromptMedia, media_of
from relax_actors.engines.torch.towers import Encoded, encode, in_tower_order
from relax_actors.media.family import Family
from relax_actors.messages import KINDS_OF_MEDIA


@dataclass(frozen=True, slots=True)
class Placement:
    """Which embedding of which medium replaces the embedding of which token.

    Attributes:
        media: distinct media of all sequences.
        target: `[placeholders] int64`, index of each placeholder in the flattened tokens, ascending.
        source: `[placeholders] int64`, index of its embedding in `Encoded.embeddings`.
        visual: `[placeholders] bool`, true for placeholders of images and videos.
        joins_images: whether the tokens of an image attend to each other, also to later ones.
    """

    media: list[PromptMedia]
    target: Tensor
    source: Tensor
    visual: Tensor
    joins_images: bool = False

    @classmethod
    def of(
        cls,
        family: Family,
        sequences: Sequence[tuple[NDArray[Any], PromptMedia | None]],
        paths: Sequence[NDArray[Any]],
        device: torch.device,
    ) -> Placement | None:
        """Find the placeholders of sequences; None if no sequence has media.

        Args:
            family: family of the model.
            sequences: token ids `[len]` and media of each sequence.
            paths: `[len] int64` of each sequence, index of its tokens in the flattened tokens. Sequences that share a
                prefix have the same indices there.
            device: device of the tensors.

        Raises:
            ValueError: a sequence has more or fewer placeholders than its media.
        """
        distinct = media_of(media for _, media in sequences)
        if not distinct:
            return None
        items = in_tower_order(distinct)
        ends = np.cumsum([item.tokens for item in items])
        first = {id(item): int(end) - item.tokens for item, end in zip(items, ends, strict=True)}
        places = [
            _places(family, tokens, media, first, path)
            for (tokens, media), path in zip(sequences, paths, strict=True)
            if media is not None and media.items
        ]
        target, source, visual = np.concatenate(places, axis=1)
        order = np.unique(target, return_index=True)[1]
        on = [torch.from_numpy(array[order]).to(device) for array in (target, source, visual.astype(np.bool_))]
        return cls(distinct, on[0], on[1], on[2], family.spec.decoder.joins_images)


def _places(
    family: Family, tokens: NDArray[Any], media: PromptMedia, first: dict[int, int], path: NDArray[Any]
) -> NDArray[Any]:
    """Find the placeholders of one sequence, `[3, placeholders]`: target, source and whether it is visual."""
    prompt = tokens[: media.positions.shape[1]]
    places = []
    for kind in KINDS_OF_MEDIA:
        items = media.of_kind(kind)
        at = np.flatnonzero(prompt == family.ids[kind]) if items else np.empty(0, np.int64)
        embeddings = [np.arange(first[id(item)], first[id(item)] + item.tokens) for item in items]
        if len(at) != (expected := sum(map(len, embeddings))):
            msg = (
                f"a prompt has {len(at)} placeholders of kind {kind}, its {len(items)} media have {expected}; they "
                "were prepared for another prompt or another model"
            )
            raise ValueError(msg)
        if items:
            places.append(np.stack([path[at], np.concatenate(embeddings), np.full(len(at), items[0].visual)]))
    return np.concatenate(places, axis=1)


def image_blocks(media: PromptMedia | None, length: int) -> NDArray[Any]:
    """Return the number of the image of each token of a sequence, -1 for text, `[length] int64`."""
    blocks = np.full(length, -1)
    for number, item in enumerate(() if media is None else media.items):
        blocks[item.start : item.start + item.tokens] = number
    return blocks


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the text model of a multimodal model: embeddings, layers and last norm."""
    decoder: PreTrainedModel = getattr(model.model, "language_model", model.model)
    return decoder


def encode_placed(model: PreTrainedModel, family: Family, placement: Placement | None) -> Encoded | None:
    """Run the towers on the media of a placement; None without media."""
    return None if placement is None else encode(model, family, placement.media)


def hidden_states(
    model: PreTrainedModel, tokens: Tensor, placement: Placement | None, encoded: Encoded | None, **settings: Any
) -> Tensor:
    """Run the decoder.

    Args:
        model: multimodal model.
        tokens: `[batch, len] int64`.
        placement: places of media in `tokens`; None without media.
        encoded: embeddings of these media.
        settings: other arguments of the decoder; `position_ids` are `[3, batch, len]`. A `packing` has the blocks of
            images already, an `attention_mask` `[batch, len]` gets them here.

    Returns:
        `[batch, len, hidden]`, which the head `model.lm_head` reads.
    """
    decoder = decoder_of(model)
    if "mrope_section" not in (decoder.config.rope_parameters or {}):
        settings["position_ids"] = settings["position_ids"][0]
    if placement is None or encoded is None:
        settings["input_ids"] = tokens
    else:
        embeddings = decoder.get_input_embeddings()(tokens)
        flat = embeddings.flatten(0, 1)
        given = encoded.embeddings.index_select(0, placement.source).to(flat.dtype)
        flat = flat.index_copy(0, placement.target, given)
        if encoded.deepstack:
            settings |= _deepstack(tokens, placement, encoded)
        settings["inputs_embeds"] = flat.view(embeddings.shape)
        if placement.joins_images and "attention_mask" in settings:
            settings["attention_mask"] = _joined_masks(model, tokens, placement, settings)
    hidden: Tensor = decoder(**settings).last_hidden_state
    return hidden


def _joined_masks(model: PreTrainedModel, tokens: Tensor, placement: Placement, settings: dict[str, Any]) -> Any:
    """Return the masks of a model whose images are blocks, by the kind of its layers."""
    of_image = torch.zeros_like(tokens).flatten()
    of_image[placement.target] = 1
    names = ("inputs_embeds", "attention_mask", "past_key_values", "position_ids")
    arguments = {name: settings.get(name) for name in names}
    make: Any = model.create_masks_for_generate
    return make(config=model.config, token_type_ids=of_image.view(tokens.shape), **arguments)


def _deepstack(tokens: Tensor, placement: Placement, encoded: Encoded) -> dict[str, Any]:
    source = placement.source[placement.visual]
    if not len(source):
        return {}
    mask = torch.zeros(tokens.numel(), dtype=torch.bool, device=tokens.device)
    mask[placement.target[placement.visual]] = True
    layers = [layer.index_select(0, source) for layer in encoded.deepstack]
    return {"visual_pos_masks": mask.view(tokens.shape), "deepstack_visual_embeds": layers}


def positions_of(
    sequences: Sequence[tuple[int, PromptMedia | None]], shared: Sequence[int] | None = None
) -> NDArray[Any]:
    """Return rotary positions of concatenated sequences, `[3, total]`, int64 or, with fractions, float32.

    Args:
        sequences: length and media of each sequence; without media the positions are 0, 1, 2 ... on all axes.
        shared: leading tokens of each sequence to leave out; none by default.
    """
    parts = [
        np.broadcast_to(np.arange(length), (3, length)) if media is None else media.positions_of(length)
        for length, media in sequences
    ]
    if shared is not None:
        parts = [part[:, prefix:] for part, prefix in zip(parts, shared, strict=True)]
    positions = np.concatenate(parts, axis=1)
    return positions.astype(np.float32 if positions.dtype.kind == "f" else np.int64)
