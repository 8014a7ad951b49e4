"""Families of multimodal models: one file each, registered here."""

from relax_actors.media.families.gemma3 import GEMMA3
from relax_actors.media.families.glm4v import GLM4V
from relax_actors.media.families.internvl import INTERNVL
from relax_actors.media.families.qwen2_5_omni import QWEN2_5_OMNI
from relax_actors.media.families.qwen2_5_vl import QWEN2_5_VL
from relax_actors.media.families.qwen2_audio import QWEN2_AUDIO
from relax_actors.media.families.qwen2_vl import QWEN2_VL
from relax_actors.media.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from relax_actors.media.families.qwen3_omni import QWEN3_OMNI
from relax_actors.media.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from relax_actors.media.families.spec import AudioSpec, FamilySpec, VisionSpec

FAMILIES = {
    family.model_type: family
    for family in (
        QWEN2_VL,
        QWEN2_5_VL,
        QWEN3_VL,
        QWEN3_VL_MOE,
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN2_5_OMNI,
        QWEN3_OMNI,
        QWEN2_AUDIO,
        GEMMA3,
        GLM4V,
        INTERNVL,
    )
}
"""Families by model type."""
FAMILIES_BY_TYPE = FAMILIES | {family.whole: family for family in FAMILIES.values() if family.whole}
"""The same, with omni models that have a voice, too."""
REFUSED = {
    "kimi_vl": "transformers has no class for it, and code that comes with a model folder is not run",
}
"""Why known families are not supported, by model type."""

__all__ = ["FAMILIES", "FAMILIES_BY_TYPE", "REFUSED", "AudioSpec", "FamilySpec", "VisionSpec"]
