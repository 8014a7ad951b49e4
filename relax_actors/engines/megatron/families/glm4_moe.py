"""GLM-4.5 with experts: routers of DeepSeek-V3, and rotary positions in half of each head."""

from relax_actors.engines.megatron.families.deepseek_v3 import SIGMOID_EXPERTS
from relax_actors.engines.megatron.families.spec import TextFamily

GLM4_MOE = TextFamily(
    model_type="glm4_moe",
    supported={"attention_bias": (None, True, False), "norm_topk_prob": (None, True)},
    qk_layernorm="use_qk_norm",
    qkv_bias="attention_bias",
    has_windows=False,
    rotary_fraction=0.5,
    experts=SIGMOID_EXPERTS,
)
