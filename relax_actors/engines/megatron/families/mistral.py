"""Mistral, and Mixtral with experts."""

from relax_actors.engines.megatron.families.spec import ExpertSpec, TextFamily

MISTRAL = TextFamily(model_type="mistral")
MIXTRAL = TextFamily(
    model_type="mixtral",
    supported={"router_jitter_noise": (None, 0.0)},
    experts=ExpertSpec(width="intermediate_size", normalises=True),
    stored_names=(
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ),
)
