"""Towers of multimodal transformers models: features of media to embeddings of placeholder tokens.

Each medium is encoded once for all sequences that hold it. Beyond rounding, the result does not depend on other
prompts: those whose sounds would be padded differently are encoded apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from relax_actors.engines.protocols.media import MediaItem, PromptMedia
from relax_actors.media.family import Family
from relax_actors.media.normalise import pixel_values, tiles_of


@dataclass(frozen=True, slots=True)
class Encoded:
    """Embeddings of media, concatenated.

    Attributes:
        embeddings: `[tokens, hidden]`, those of all images and videos, then those of all sounds.
        deepstack: `[visual_tokens, hidden]` for each of the first layers, which are added to the layer's output at the
            placeholders of images and videos; empty for families without.
    """

    embeddings: Tensor
    deepstack: tuple[Tensor, ...] = ()


def in_tower_order(media: Sequence[PromptMedia]) -> list[MediaItem]:
    """Return the distinct items of several prompts in the order of `Encoded.embeddings`."""
    distinct = {id(item): item for one in media for item in one.items}
    return sorted(distinct.values(), key=lambda item: not item.visual)


def works_of(media: Sequence[PromptMedia]) -> list[list[MediaItem]]:
    """Return what can be encoded apart: each image or video, and the sounds of each prompt.

    The embeddings of the works, one after the other, are in the order of `Encoded.embeddings`.
    """
    return [*([item] for item in in_tower_order(media) if item.visual), *_sounds_by_prompt(media)]


def encode(model: PreTrainedModel, family: Family, media: Sequence[PromptMedia]) -> Encoded:
    """Run the towers on the media of several prompts, at least one item; see `encode_works`."""
    return encode_works(model, family, works_of(media))


def encode_works(model: PreTrainedModel, family: Family, works: Sequence[list[MediaItem]]) -> Encoded:
    """Run the towers.

    Args:
        model: model of the family.
        family: its family.
        works: some of `works_of`, in its order, at least one.

    Raises:
        ValueError: the towers returned another number of embeddings than the media have placeholders.
    """
    visual = [item for work in works for item in work if item.visual]
    sounds = [work for work in works if not work[0].visual]
    parts: list[Tensor] = []
    deepstack: tuple[Tensor, ...] = ()
    if visual:
        found, deepstack = _encode_visual(model, family, visual)
        parts.append(found)
    if sounds:
        parts += _encode_sounds(model, family, sounds)
    embeddings = torch.cat(parts)
    if len(embeddings) != (expected := sum(item.tokens for work in works for item in work)):
        msg = (
            f"the towers of {family.model_type} returned {len(embeddings)} embeddings for {expected} placeholders; "
            "the media were prepared for another model or by another version of the preprocessing"
        )
        raise ValueError(msg)
    return Encoded(embeddings, deepstack)


def _sounds_by_prompt(media: Sequence[PromptMedia]) -> list[list[MediaItem]]:
    """Return the sounds of each prompt, without those that an earlier one holds, too."""
    seen, found = set[int](), []
    for one in media:
        found.append([item for item in one.items if not item.visual and id(item) not in seen])
        seen |= {id(item) for item in found[-1]}
    return [sounds for sounds in found if sounds]


def _encode_visual(
    model: PreTrainedModel, family: Family, items: Sequence[MediaItem]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    if family.vision is None:
        msg = f"a {family.model_type} model has no tower for images and videos"
        raise ValueError(msg)
    device = _device_of(model, "visual", "vision_tower")
    patches = [torch.from_numpy(np.array(item.features)).to(device) for item in items]
    pixels = torch.cat([pixel_values(one, family.vision) for one in patches])
    if family.vision.tile:
        return encode_tiles(model, tiles_of(pixels, family.vision)), ()
    grid = torch.from_numpy(np.stack([item.grid for item in items]).astype(np.int64))
    return encode_patches(model, pixels, grid.to(device))


def encode_patches(model: PreTrainedModel, pixels: Tensor, grid: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Encode the pixel values of patches, `[patches, values]`, whose `grid` is `[media, 3] int64`.

    Returns `Encoded.embeddings` and `Encoded.deepstack`.
    """
    # Images and videos go through the same tower, so one call encodes both.
    encode_images: Any = model.get_image_features
    found = encode_images(pixels, image_grid_thw=grid, return_dict=True)
    deepstack = getattr(found, "deepstack_features", None) or ()
    return _joined(found.pooler_output), tuple(map(_joined, deepstack))


def _device_of(model: PreTrainedModel, *names: str) -> torch.device:
    """Return where a tower computes; other weights of the model may be elsewhere, as with `trainer.torch.offload`."""
    places = [owner for owner in (model, getattr(model, "model", None)) if owner is not None]
    tower = next(getattr(owner, name) for owner in places for name in names if hasattr(owner, name))
    device: torch.device = next(tower.parameters()).device
    return device


def _joined(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the rows of all images; some versions of transformers return them image by image."""
    return parts if isinstance(parts, Tensor) else torch.cat(tuple(parts))


def encode_tiles(model: PreTrainedModel, tiles: Tensor) -> Tensor:
    """Encode `[tiles, 3, side, side]`; return the embeddings of all, one tile after the other."""
    encode_images: Any = model.get_image_features
    names = ("vision_feature_layer", "vision_feature_select_strategy")
    chosen = {name: getattr(model.config, name) for name in names if hasattr(model.config, name)}
    found = encode_images(tiles, return_dict=True, **chosen)
    embeddings: Tensor = found.pooler_output.flatten(0, 1)
    return embeddings


def _encode_sounds(model: PreTrainedModel, family: Family, prompts: Sequence[list[MediaItem]]) -> list[Tensor]:
    """Encode the sounds of several prompts; return the embeddings of each prompt, in order.

    Those of one prompt are padded to its longest chunk, as by the model itself; prompts that are padded alike share a
    batch.
    """
    encode_batch: Any = _encode_whole if family.audio is not None and family.audio.fixed else _encode_chunked
    chunk = 2 * int(getattr(_audio_tower(model), "n_window", 0))
    found: dict[int, Tensor] = {}

    def padding(index: int) -> int:
        return max(min(int(item.grid[0]), chunk) for item in prompts[index])

    for _, group in groupby(sorted(range(len(prompts)), key=padding), key=padding):
        indices = list(group)
        embeddings = encode_batch(model, [item for index in indices for item in prompts[index]])
        sizes = [sum(item.tokens for item in prompts[index]) for index in indices]
        found |= dict(zip(indices, embeddings.split(sizes), strict=True))
    return [found[index] for index in range(len(prompts))]


def _encode_chunked(model: PreTrainedModel, items: Sequence[MediaItem]) -> Tensor:
    """Encode sounds with a tower that cuts each one into chunks (Qwen2.5-Omni, Qwen3-Omni)."""
    features, mask = _padded(model, items)
    encode_sounds: Any = model.get_audio_features
    found: Tensor = encode_sounds(features, feature_attention_mask=mask, return_dict=True).last_hidden_state
    return found


def _encode_whole(model: PreTrainedModel, items: Sequence[MediaItem]) -> Tensor:
    """Encode sounds with a tower that reads a fixed number of frames (Qwen2-Audio)."""
    tower, projector = _audio_tower(model), model.model.multi_modal_projector
    features, mask = _padded(model, items)
    embeddings: Any = projector(
        tower(features, attention_mask=audio_attention(tower, features, mask)).last_hidden_state
    )
    return torch.cat([one[: item.tokens] for one, item in zip(embeddings, items, strict=True)])


def audio_attention(tower: PreTrainedModel, features: Tensor, mask: Tensor) -> Any:
    """Return the attention mask of Qwen2-Audio's tower.

    Args:
        tower: the tower, in transformers.
        features: `[sounds, mels, frames]`.
        mask: `[sounds, frames]`, 1 for frames of the sound.
    """
    # The first convolution of the tower keeps the number of frames, the second halves it.
    read = mask[:, ::2]
    shape = read[..., None].to(features.dtype)
    return create_bidirectional_mask(config=tower.config, inputs_embeds=shape, attention_mask=read)


def _audio_tower(model: PreTrainedModel) -> Any:
    return getattr(model, "audio_tower", None) or model.model.audio_tower


def _padded(model: PreTrainedModel, items: Sequence[MediaItem]) -> tuple[Tensor, Tensor]:
    """Pad sounds to the longest.

    Returns:
        `[sounds, mels, frames]` of the model's dtype, and `[sounds, frames] int64`, 1 for frames of the sound.
    """
    frames = max(item.features.shape[1] for item in items)
    features = np.stack([np.pad(item.features, ((0, 0), (0, frames - item.features.shape[1]))) for item in items])
    mask = (np.arange(frames) < np.array([int(item.grid[0]) for item in items])[:, None]).astype(np.int64)
    device = _device_of(model, "audio_tower")
    return torch.from_numpy(features).to(device, model.dtype), torch.from_numpy(mask).to(device)
