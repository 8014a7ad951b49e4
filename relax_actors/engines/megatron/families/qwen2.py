"""Qwen2 and Qwen2.5, dense and with experts, of which some compute every token."""

from relax_actors.engines.megatron.families.spec import ExpertSpec, TextFamily

QWEN2 = TextFamily(model_type="qwen2", qkv_bias=True)
QWEN2_MOE = TextFamily(
    model_type="qwen2_moe",
    qkv_bias="qkv_bias",
    experts=ExpertSpec(
        shared="shared_expert",
        shared_width=lambda fields: int(fields["shared_expert_intermediate_size"]),
        has_shared_gate=True,
    ),
)
