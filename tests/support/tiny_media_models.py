"""Tiny multimodal models for tests: an architecture of each family, and prompts with random media."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.engines.megatron.families import TEXT_FAMILIES
from relax_actors.engines.protocols import MediaItem, PromptMedia
from relax_actors.media.families import FAMILIES as REGISTERED
from relax_actors.media.family import Family
from relax_actors.media.normalise import pixel_values, tiles_of
from tests.support.text_families import RECURRENT

PROMPTS: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {
    ("image", "video"): (("image",), ("video", "image"), ()),
    ("image",): (("image",), ("image", "image"), ()),
    ("audio",): (("audio",), ("audio", "audio"), ()),
    ("image", "video", "audio"): (("image", "audio"), ("audio", "video", "image", "audio"), ()),
}
"""Kinds of media of some prompts by those that a family takes: alone, mixed, and none."""

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
INTERLEAVED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
SECTIONED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
MOE = {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8}
VISION |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
VISION3 = VISION | {"in_channels": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
VISION3_MOE = VISION3 | {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]}
VISION2 = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2}
VISION2 |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
VISION25 = VISION | {"fullatt_block_indexes": [1], "window_size": 32}
SOUND = {"num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32}
SOUND |= {"output_dim": 32, "n_window": 50, "max_source_positions": 200}
VISION35 = VISION | {"in_channels": 3, "num_position_embeddings": 16}
VISION_GLM = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8}
VISION_GLM |= {"out_hidden_size": 32, "image_size": 32}
TILES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TILES |= {"image_size": [32, 32], "patch_size": [8, 8]}
SQUARE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARE |= {"image_size": 32, "patch_size": 8, "vision_use_head": False}
HALF_TURNED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
WHOLE = INTERLEAVED | {"partial_rotary_factor": 1.0}
RECURRENT_MOE = RECURRENT | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_expert_intermediate_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": TEXT | {"rope_parameters": SECTIONED}, "vision_config": VISION2},
    "qwen2_5_vl": {"text_config": TEXT | {"rope_parameters": SECTIONED}, "vision_config": VISION25},
    "qwen3_vl": {"text_config": TEXT | {"rope_parameters": INTERLEAVED}, "vision_config": VISION3},
    "qwen3_vl_moe": {"text_config": TEXT | MOE | {"rope_parameters": INTERLEAVED}, "vision_config": VISION3_MOE},
    "qwen2_5_omni_thinker": {
        "text_config": TEXT | {"rope_parameters": SECTIONED},
        "vision_config": VISION25,
        "audio_config": SOUND,
        "position_id_per_seconds": 25,
    },
    "qwen3_omni_moe_thinker": {
        "text_config": TEXT | MOE | {"rope_parameters": INTERLEAVED},
        "vision_config": VISION3_MOE,
        "audio_config": SOUND | {"n_window_infer": 200, "downsample_hidden_size": 16},
        "position_id_per_seconds": 13,
    },
    "qwen3_5": {"text_config": TEXT | RECURRENT | {"rope_parameters": WHOLE}, "vision_config": VISION35},
    "qwen3_5_moe": {
        "text_config": TEXT | MOE | RECURRENT_MOE | {"rope_parameters": WHOLE},
        "vision_config": VISION35,
    },
    "qwen2_audio": {
        "text_config": {"model_type": "qwen2"} | TEXT,
        "audio_config": {**SOUND, "model_type": "qwen2_audio_encoder", "max_source_positions": 100},
    },
    "internvl": {
        "text_config": {"model_type": "qwen2"} | TEXT,
        "vision_config": TILES,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": SQUARE,
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": False,
    },
    "glm4v": {"text_config": TEXT | {"rope_parameters": HALF_TURNED}, "vision_config": VISION_GLM},
}
"""`model.architecture` of each family by model type, without `model_type` itself."""
OF_MEGATRON = [name for name in FAMILIES if REGISTERED[name].decoder.family in TEXT_FAMILIES]
"""Families whose decoder Megatron-Core has."""
FIXED_FRAMES = 200
"""Frames that the tower of the tiny Qwen2-Audio reads."""


def architecture_of(model_type: str) -> dict[str, Any]:
    """Return `model.architecture` of a family."""
    return {"model_type": model_type} | FAMILIES[model_type]


def plain_logits(model: PreTrainedModel, family: Family, tokens: NDArray[Any], media: PromptMedia) -> Tensor:
    """Return the logits `[len, vocab]` of a sequence by the model's own forward, as a user of transformers calls it.

    Barred ids are cut. The positions after the prompt are the model's own, too.
    """
    inputs = model_inputs(family, tokens, media.items)
    inputs.pop("frames", None)
    found: Tensor = model(**inputs).logits[0]
    return found.index_fill(-1, torch.tensor(family.barred), float("-inf"))


class MediaPrompts:
    """Makes prompts with random media for a family; the same seed makes the same prompts.

    Rotary positions are those of the model's own rule.

    Args:
        model: model of the family.
        family: its family.
        seed: seed of all media and texts.
    """

    def __init__(self, model: PreTrainedModel, family: Family, seed: int = 0) -> None:
        self._model, self._family, self._random = model, family, np.random.default_rng(seed)

    def make(self, *kinds: str, text: int = 4, seconds: float = 1.0) -> tuple[NDArray[Any], PromptMedia]:
        """Make a prompt with media of these kinds, text before, between and after them.

        Args:
            kinds: of the media, in order.
            text: tokens of each piece of text.
            seconds: between two temporal patches of a video.

        Returns:
            `[len] int32`, and the media.
        """
        tokens, items = self._text(text), []
        for kind in kinds:
            item = self._sound(len(tokens) + 1) if kind == "audio" else self._visual(kind, len(tokens) + 1, seconds)
            tokens += [self._bound(kind, "start"), *[self._family.ids[kind]] * item.tokens, self._bound(kind, "end")]
            tokens += self._text(text)
            items.append(item)
        ids = np.array(tokens, np.int32)
        positions = self.positions(ids, items)
        return ids, PromptMedia(tuple(items), positions, float(positions.max()) + 1 - len(ids))

    def _text(self, length: int) -> list[int]:
        found: list[int] = self._random.integers(0, 10, length).tolist()
        return found

    def _bound(self, kind: str, end: str) -> int:
        return self._family.ids[f"{'audio' if kind == 'audio' else 'vision'}_{end}"]

    def _visual(self, kind: str, start: int, between: float) -> MediaItem:
        spec = self._family.vision
        assert spec is not None
        time = 1 if kind == "image" else int(self._random.integers(1, 3))
        rows, columns = (2 * int(self._random.integers(1, 4)) for _ in range(2))
        if spec.tile:
            time = int(self._random.integers(1, 4)) if spec.tiles[1] > 1 else 1
            rows = columns = spec.tile // spec.patch
        frames = 1 if kind == "image" else spec.temporal
        shape = (time * rows * columns, 3 * frames * spec.patch**2)
        patches = self._random.integers(0, 256, shape, np.uint8)
        grid, seconds = np.array([time, rows, columns], np.int32), between if kind == "video" else 0.0
        tokens = time * rows * columns // spec.merge**2
        return MediaItem(kind, patches, grid, start, tokens, seconds)  # type: ignore[arg-type]

    def _sound(self, start: int) -> MediaItem:
        spec = self._family.audio
        assert spec is not None
        frames = int(self._random.integers(20, 180))
        width = FIXED_FRAMES if spec.fixed else frames
        features = self._random.standard_normal((spec.mels, width)).astype(np.float32)
        return MediaItem("audio", features, np.array([frames], np.int32), start, spec.tokens(frames))

    def positions(self, tokens: NDArray[Any], items: Sequence[MediaItem]) -> NDArray[Any]:
        """Return the rotary positions of a prompt by the model's own rule, `[3, len]`."""
        if self._family.spec.positions.sections == "one axis" or not items:
            return np.broadcast_to(np.arange(len(tokens), dtype=np.int32), (3, len(tokens)))
        owner: Any = self._model if hasattr(self._model, "get_rope_index") else self._model.model
        inputs = model_inputs(self._family, tokens, items)
        wanted = ("input_ids", "attention_mask", "image_grid_thw", "video_grid_thw", "mm_token_type_ids")
        settings: dict[str, Any] = {name: inputs[name] for name in wanted if name in inputs}
        if self._family.audio:
            settings |= {"audio_seqlens": inputs.get("frames"), "second_per_grids": inputs.get("video_second_per_grid")}
        elif self._family.model_type == "qwen2_5_vl" and "second_per_grid_ts" in inputs:
            settings["second_per_grid_ts"] = inputs["second_per_grid_ts"]
        found, _ = owner.get_rope_index(**settings)
        positions: NDArray[Any] = found[:, 0].numpy()
        return positions.astype(np.float32 if positions.dtype.kind == "f" else np.int32)


def prompts_of(model: PreTrainedModel, family: Family, seed: int = 0) -> list[tuple[NDArray[Any], PromptMedia]]:
    """Make a prompt for each entry of PROMPTS of the family."""
    make = MediaPrompts(model, family, seed).make
    return [make(*kinds) for kinds in PROMPTS[family.kinds]]


def model_inputs(family: Family, tokens: NDArray[Any], items: Sequence[MediaItem]) -> dict[str, Tensor]:
    """Return the arguments of a transformers model for one sequence with media, as its processor makes them."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for kind, suffix, grid in (("image", "", "image_grid_thw"), ("video", "_videos", "video_grid_thw")):
        if chosen := [item for item in items if item.kind == kind]:
            assert family.vision is not None
            pixels = [pixel_values(torch.from_numpy(item.features), family.vision) for item in chosen]
            found[f"pixel_values{suffix}"] = torch.cat(pixels)
            if family.vision.tile:
                found["pixel_values"] = tiles_of(torch.cat(pixels), family.vision)
                continue
            found[grid] = torch.from_numpy(np.stack([item.grid for item in chosen]).astype(np.int64))
    if (videos := [item for item in items if item.kind == "video"]) and not family.spec.timestamp:
        name = "video_second_per_grid" if family.audio else "second_per_grid_ts"
        found[name] = torch.tensor([item.seconds_per_grid for item in videos])
    if sounds := [item for item in items if item.kind == "audio"]:
        found |= _sound_inputs(sounds)
    if family.spec.decoder.joins_images or not (family.audio or (family.vision and family.vision.tile)):
        kinds = [
            torch.full_like(ids, number + 1) * (ids == family.ids[kind])
            for number, kind in enumerate(("image", "video"))
            if kind in family.kinds
        ]
        name = "token_type_ids" if family.spec.decoder.joins_images else "mm_token_type_ids"
        found[name] = torch.stack(kinds).sum(0).int()
    return found


def _sound_inputs(sounds: Sequence[MediaItem]) -> dict[str, Tensor]:
    width = max(sound.features.shape[1] for sound in sounds)
    padded = [np.pad(sound.features, ((0, 0), (0, width - sound.features.shape[1]))) for sound in sounds]
    frames = torch.tensor([int(sound.grid[0]) for sound in sounds])
    mask = (torch.arange(width) < frames[:, None]).long()
    return {"input_features": torch.from_numpy(np.stack(padded)), "feature_attention_mask": mask, "frames": frames}
