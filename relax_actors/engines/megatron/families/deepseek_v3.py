"""DeepSeek-V3: latent attention, and routers that choose among groups of experts by a score with a bias."""

from relax_actors.engines.megatron.families.spec import ExpertSpec, TextFamily

SIGMOID_EXPERTS = ExpertSpec(
    scores="sigmoid",
    normalises=True,
    has_bias=True,
    shared="shared_experts",
    shared_width=lambda fields: int(fields["n_shared_experts"]) * int(fields["moe_intermediate_size"]),
)
"""GLM-4-MoE has the same."""
DEEPSEEK_V3 = TextFamily(
    model_type="deepseek_v3",
    # transformers normalises the latent vectors with this epsilon, whatever config.json says.
    supported={"norm_topk_prob": (None, True), "rope_interleave": (None, True), "rms_norm_eps": (None, 1e-6)},
    has_windows=False,
    has_latent_attention=True,
    experts=SIGMOID_EXPERTS,
)
