"""Qwen3.5, dense and with experts: vision of Qwen3-VL, a mostly recurrent decoder."""

from dataclasses import replace

from relax_actors.media.families.qwen3_vl import QWEN3_VL
from relax_actors.media.families.spec import DecoderSpec, SglangSpec

QWEN3_5 = replace(QWEN3_VL, model_type="qwen3_5", decoder=DecoderSpec("qwen3_5_text"), sglang=SglangSpec())
QWEN3_5_MOE = replace(QWEN3_5, model_type="qwen3_5_moe", decoder=DecoderSpec("qwen3_5_moe_text"))
