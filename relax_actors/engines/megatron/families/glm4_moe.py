"""GLM-4.5 and its successors with experts: routers of DeepSeek-V3, and half of a head's dimensions turn."""

from relax_actors.engines.megatron.families.spec import ExpertSpec, TextFamily

GLM4_MOE = TextFamily(
    model_type="glm4_moe",
    supported={"attention_bias": (None, True, False), "norm_topk_prob": (None, True)},
    qk_layernorm="use_qk_norm",
    qkv_bias="attention_bias",
    has_windows=False,
    rotary_fraction=0.5,
    experts=ExpertSpec(
        scores="sigmoid",
        normalises=True,
        has_bias=True,
        shared="shared_experts",
        shared_width=lambda fields: int(fields["n_shared_experts"]) * int(fields["moe_intermediate_size"]),
    ),
)
