"""Multimodal models whose towers read features from the store, and forget them when weights change."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.managers import mm_schedule
from sglang.srt.models import qwen2_5_vl, qwen2_audio, qwen2_vl, qwen3_omni_moe, qwen3_vl, qwen3_vl_moe
from torch import Tensor

from relax_actors.engines.sglang.server_models.fractions import read_fractions
from relax_actors.engines.torch.towers import audio_attention
from relax_actors.media.normalise import pixel_values


class ForgetsFeatures:
    """A model of which no encoded medium outlives its weights.

    SGLang keeps encoded media by their content and empties that cache neither at an update nor when it flushes the
    key-value cache, so the same picture would keep the features of the old towers.
    """

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Load weights, of an update or a part of one, and empty the cache of encoded media."""
        loaded = super().load_weights(weights)  # type: ignore[misc]
        if mm_schedule.embedding_cache is not None:
            mm_schedule.embedding_cache.clear()
        return loaded


class ReadsPatches:
    """A model whose tower of images and videos reads uint8 patches."""

    def get_image_feature(self, items: list[Any]) -> Tensor:
        """Encode images; they and videos go through the same tower."""
        return self.get_video_feature(items)

    def get_video_feature(self, items: list[Any]) -> Tensor:
        """Encode videos."""
        features: Tensor = super().get_video_feature([_normalised(item) for item in items])  # type: ignore[misc]
        return features


def _normalised(item: Any) -> Any:
    """Return an item with the pixel values of its patches."""
    copied = copy.copy(item)
    copied.feature = pixel_values(item.feature, item.vision)
    copied.model_specific_data = item.model_specific_data | {"video_grid_thw": item.grid_thw}
    return copied


class Qwen2VLForConditionalGeneration(ForgetsFeatures, ReadsPatches, qwen2_vl.Qwen2VLForConditionalGeneration):  # type: ignore[misc]
    """Qwen2-VL."""


class Qwen2_5_VLForConditionalGeneration(  # noqa: N801 SGLang's name
    ForgetsFeatures,
    ReadsPatches,
    qwen2_5_vl.Qwen2_5_VLForConditionalGeneration,  # type: ignore[misc]
):
    """Qwen2.5-VL."""

    def get_video_feature(self, items: list[Any]) -> Tensor:
        """Encode videos; SGLang's own function lets the frames of a video attend to each other."""
        return super().get_video_feature([_frame_by_frame(item) for item in items])


def _frame_by_frame(item: Any) -> Any:
    """Return an item with a grid for each frame."""
    frames, rows, columns = item.grid_thw[0].tolist()
    copied = copy.copy(item)
    grid = torch.tensor([[1, rows, columns]]).expand(frames, -1)
    copied.model_specific_data = item.model_specific_data | {"grid_thw": grid}
    return copied


class Qwen3VLForConditionalGeneration(ForgetsFeatures, ReadsPatches, qwen3_vl.Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    """Qwen3-VL."""


class Qwen3VLMoeForConditionalGeneration(
    ForgetsFeatures,
    ReadsPatches,
    qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration,  # type: ignore[misc]
):
    """Qwen3-VL with experts."""

    def __init__(self, config: Any, *arguments: Any, **settings: Any) -> None:
        super().__init__(config, *arguments, **settings)
        _add_deepstack(self.model, config.vision_config)


def _add_deepstack(model: Any, vision: Any) -> None:
    """Add features to as many first layers as the config says: SGLang's models with experts take three for granted."""
    model.deepstack_embed_to_decoder_layer = range(len(vision.deepstack_visual_indexes))


class Thinker(ReadsPatches, qwen3_omni_moe.Qwen3OmniMoeThinkerForConditionalGeneration):  # type: ignore[misc]
    """The part of Qwen3-Omni that reads and writes text."""

    def get_audio_feature(self, items: list[Any]) -> list[Tensor]:
        """Encode sounds; those of prompts that are padded differently apart, as the embeddings depend on it."""
        tower, embedded = self.audio_tower, dict[int, Tensor]()
        for padding in {item.padding for item in items}:
            group = [number for number, item in enumerate(items) if item.padding == padding]
            sounds = [items[number].feature[0, :, : items[number].frames] for number in group]
            # Silence pads all others to the sound that makes its prompt's padding: that sound may be in the cache.
            sounds.append(torch.zeros_like(sounds[0][:, :1]).expand(-1, padding))
            lengths = torch.tensor([sound.shape[1] for sound in sounds], device=tower.conv2d1.weight.device)
            features = torch.cat(sounds, 1).to(lengths.device, tower.dtype)
            embeddings = tower(features, feature_lens=lengths).last_hidden_state.flatten(0, -2)
            sizes = [placeholders(items[number]) for number in group]
            embedded |= dict(zip(group, embeddings[: sum(sizes)].split(sizes), strict=True))
        return [embedded[number] for number in range(len(items))]


def placeholders(item: Any) -> int:
    """Return the number of placeholders of a medium."""
    return sum(last - first + 1 for first, last in item.offsets)


class Qwen3OmniMoeForConditionalGeneration(ForgetsFeatures, qwen3_omni_moe.Qwen3OmniMoeForConditionalGeneration):  # type: ignore[misc]
    """Qwen3-Omni without its voice."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.thinker.__class__ = Thinker
        _add_deepstack(self.thinker.model, self.config.thinker_config.vision_config)
        read_fractions(self.thinker)


class Qwen2AudioForConditionalGeneration(ForgetsFeatures, qwen2_audio.Qwen2AudioForConditionalGeneration):  # type: ignore[misc]
    """Qwen2-Audio."""

    def get_audio_feature(self, items: list[Any]) -> Tensor:
        """Encode sounds; SGLang's own function attends to the frames after a sound, too."""
        tower = self.audio_tower
        features = torch.cat([item.feature for item in items]).to(tower.dtype)
        frames = torch.tensor([item.frames for item in items], device=features.device)
        mask = (torch.arange(features.shape[2], device=features.device) < frames[:, None]).long()
        hidden = tower(features, attention_mask=audio_attention(tower, features, mask)).last_hidden_state
        embeddings = self.multi_modal_projector(hidden)
        return torch.cat([one[: placeholders(item)] for one, item in zip(embeddings, items, strict=True)])


EntryClass = ForgetsFeatures.__subclasses__()
"""Where SGLang looks for the classes of a module."""
