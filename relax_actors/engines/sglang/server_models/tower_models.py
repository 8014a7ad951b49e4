"""Models with the towers of transformers in front of a decoder of SGLang, which has no class of its own for them.

The towers are those of the trainer, so their embeddings are its bits but for rounding.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from sglang.srt.managers.mm_utils import general_mm_embed_routine, pad_mm_tokens
from sglang.srt.models.glm4 import Glm4ForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from relax_actors.engines.sglang.server_models.media_models import ForgetsFeatures
from relax_actors.engines.sglang.server_models.without_decoder import towers_of
from relax_actors.engines.torch.towers import encode_patches, encode_tiles
from relax_actors.media.normalise import pixel_values, tiles_of

DECODERS = {
    "qwen2": Qwen2ForCausalLM,
    "qwen2_5_omni_text": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "glm4v_text": Glm4ForCausalLM,
}
"""Classes by `text_config.model_type`."""
DECODER, TOWERS = "language_model.", "towers."
"""Beginnings of the names of weights."""


class TowersOfTransformers(nn.Module):
    """Towers in `towers`, and a decoder with its head in `language_model`."""

    def __init__(self, config: Any, quant_config: Any = None, **_: Any) -> None:
        super().__init__()
        self.config = config
        # In transformers the head follows the whole model's setting, which the decoder's need not repeat.
        config.text_config.tie_word_embeddings = config.tie_word_embeddings
        self.language_model = DECODERS[config.text_config.model_type](config.text_config, quant_config)
        self.towers = towers_of(config, torch.get_default_dtype())

    def get_input_embeddings(self) -> Any:
        """Return the module with the embeddings of tokens."""
        return self.language_model.get_input_embeddings()

    def pad_input_ids(self, input_ids: array[int], mm_inputs: Any) -> Any:
        """Replace placeholders by values that tell media apart; see SGLang."""
        return pad_mm_tokens(input_ids, mm_inputs)

    def get_image_feature(self, items: Sequence[Any]) -> Tensor:
        """Encode images; they and videos go through the same tower."""
        tower = next(self.towers.parameters())
        pixels = torch.cat([pixel_values(item.feature.to(tower.device), item.vision) for item in items])
        if items[0].vision.tile:
            return encode_tiles(self.towers, tiles_of(pixels, items[0].vision).to(tower.dtype))
        grid = torch.cat([item.grid_thw for item in items]).to(tower.device)
        return encode_patches(self.towers, pixels.to(tower.dtype), grid)[0]

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any, **_: Any) -> Any:
        """Compute the logits of a batch; see SGLang."""
        if "mrope_section" in (self.config.text_config.rope_parameters or {}):
            positions = forward_batch.mrope_positions
        return general_mm_embed_routine(
            input_ids=input_ids,
            forward_batch=forward_batch,
            language_model=self.language_model,
            multimodal_model=self,
            positions=positions,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights, of an update or a part of one."""
        towers, of_decoder = dict(self.named_parameters()) | dict(self.named_buffers()), list[tuple[str, Tensor]]()
        for name, tensor in weights:
            if name.startswith(TOWERS):
                with torch.no_grad():
                    towers[name].copy_(tensor)
            else:
                of_decoder.append((name.removeprefix(DECODER), tensor))
        self.language_model.load_weights(of_decoder)


class InternVLForConditionalGeneration(ForgetsFeatures, TowersOfTransformers):
    """InternVL 3."""


class Glm4vForConditionalGeneration(ForgetsFeatures, TowersOfTransformers):
    """GLM-4.1V; the tower of SGLang's own class differs from the trainer's by more than rounding."""


class Qwen2_5OmniForConditionalGeneration(ForgetsFeatures, TowersOfTransformers):  # noqa: N801 as others
    """Qwen2.5-Omni without its voice."""

    def __init__(self, config: Any, quant_config: Any = None, **_: Any) -> None:
        super().__init__(config.thinker_config, quant_config)

    def get_video_feature(self, items: Sequence[Any]) -> Tensor:
        """Encode videos."""
        return self.get_image_feature(items)

    def get_audio_feature(self, items: Sequence[Any]) -> Tensor:
        """Encode sounds; the tower masks their padding."""
        tower = next(self.towers.audio_tower.parameters())
        frames = torch.tensor([item.frames for item in items], device=tower.device)
        sounds = [item.feature[0, :, : item.frames].T for item in items]
        features = pad_sequence(sounds, batch_first=True).transpose(1, 2).to(tower.device, tower.dtype)
        mask = (torch.arange(features.shape[2], device=tower.device) < frames[:, None]).long()
        encode: Any = self.towers.get_audio_features
        embeddings: Tensor = encode(features, feature_attention_mask=mask, return_dict=True).last_hidden_state
        return embeddings


EntryClass = [
    InternVLForConditionalGeneration,
    Glm4vForConditionalGeneration,
    Qwen2_5OmniForConditionalGeneration,
]
"""Where SGLang looks for the classes of a module."""
