"""Qwen2.5-VL: Qwen2-VL whose positions count the seconds of a video."""

from dataclasses import replace
from typing import Any

import numpy as np

from relax_actors.media.families.qwen2_vl import QWEN2_VL
from relax_actors.media.families.spec import PositionRule, SglangSpec


def _times(numbers: np.ndarray, seconds: np.float32, scale: np.float32) -> np.ndarray:
    return numbers * (scale * seconds)


def _scale(body: dict[str, Any]) -> float:
    return float(body["vision_config"].get("tokens_per_second", 4))


QWEN2_5_VL = replace(
    QWEN2_VL,
    model_type="qwen2_5_vl",
    positions=PositionRule("consecutive", _times, _scale),
    processors=replace(QWEN2_VL.processors, whole="Qwen2_5_VLProcessor"),
    vision_width="out_hidden_size",
    sglang=SglangSpec("Qwen2_5_VLForConditionalGeneration", QWEN2_VL.sglang.prefixes),
)
