"""Families of multimodal models that SGLang serves: its class of each, and its names of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relax_actors.errors import ConfigError
from relax_actors.media.family import Family, family_of


@dataclass(frozen=True, slots=True)
class ServedFamily:
    """How SGLang serves the models of a family.

    Attributes:
        architecture: name of SGLang's class.
        prefixes: prefixes of weights in transformers, each with that in SGLang; the first that fits counts.
    """

    architecture: str
    prefixes: tuple[tuple[str, str], ...] = ()


SERVED = {
    "qwen2_5_vl": ServedFamily(
        "Qwen2_5_VLForConditionalGeneration",
        (("model.visual.", "visual."), ("model.language_model.", "model.")),
    ),
    "qwen3_vl": ServedFamily("Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": ServedFamily("Qwen3VLMoeForConditionalGeneration"),
    "qwen3_omni_moe_thinker": ServedFamily("Qwen3OmniMoeForConditionalGeneration", (("", "thinker."),)),
    "qwen2_audio": ServedFamily(
        "Qwen2AudioForConditionalGeneration",
        (
            ("model.language_model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
            ("model.", ""),
        ),
    ),
}
"""Families by `Family.model_type`."""


def served_family(model: Path) -> tuple[Family, ServedFamily] | None:
    """Return the family of a model folder and how SGLang serves it; None for a model that reads text only.

    Raises:
        ConfigError: SGLang does not serve the family.
    """
    family = family_of(model)
    if family is None:
        return None
    if family.model_type not in SERVED:
        msg = (
            f'rollout.backend = "sglang" with a model of type {family.model_type}: among models that see or hear only '
            f'{", ".join(SERVED)} are supported; use "transformers"'
        )
        raise ConfigError(msg)
    return family, SERVED[family.model_type]
