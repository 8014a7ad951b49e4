"""Text families that megatron-core trains: one file each, registered here."""

from relax_actors.engines.megatron.families.deepseek_v3 import DEEPSEEK_V3
from relax_actors.engines.megatron.families.glm4_moe import GLM4_MOE
from relax_actors.engines.megatron.families.llama import LLAMA
from relax_actors.engines.megatron.families.mistral import MISTRAL, MIXTRAL
from relax_actors.engines.megatron.families.qwen2 import QWEN2, QWEN2_MOE
from relax_actors.engines.megatron.families.qwen3 import QWEN3, QWEN3_MOE
from relax_actors.engines.megatron.families.spec import Architecture, Experts, ExpertSpec, Latent, TextFamily

TEXT_FAMILIES = {
    family.model_type: family
    for family in (LLAMA, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, MISTRAL, MIXTRAL, GLM4_MOE, DEEPSEEK_V3)
}
"""Families by model type."""

__all__ = ["TEXT_FAMILIES", "Architecture", "ExpertSpec", "Experts", "Latent", "TextFamily"]
