"""Qwen3, dense and with experts."""

from relax_actors.engines.megatron.families.spec import ExpertSpec, TextFamily

QWEN3 = TextFamily(model_type="qwen3", qk_layernorm=True)
QWEN3_MOE = TextFamily(model_type="qwen3_moe", qk_layernorm=True, experts=ExpertSpec())
