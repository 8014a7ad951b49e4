"""Presets of rows that the policy samples, rewarded or scored by a teacher."""

from __future__ import annotations

from relax_actors.config.preset import CLIP, DPPO, GROUP, KL_IN_REWARD, ON_POLICY, SAMPLES, SCORE, TOKENS, Preset

SAMPLED: dict[str, Preset] = {
    "grpo": Preset(
        "GRPO",
        "2402.03300",
        {**GROUP, **CLIP, **SAMPLES},
        'The paper adds a KL: `kl.place = "loss"` with `kl.coefficient = 0.04`.',
        figures="Clip of PPO; standard deviation and mean of means as in sections 4.1.1 and 4.1.2, equation 3.",
    ),
    "dr_grpo": Preset(
        "Dr. GRPO",
        "2503.20783",
        {"advantage": "group", "scale": "none", **CLIP, "aggregate": "constant"},
        "`length` is `rollout.max_tokens` unless set.",
        figures="No standard deviation and a constant divisor, as the paper derives; clip of PPO.",
    ),
    "lite_ppo": Preset(
        "Lite PPO",
        "2508.08221",
        {"advantage": "group", "scale": "batch_std", **CLIP, **TOKENS},
        figures="Standard deviation of the step and mean over tokens, the two techniques of the paper; clip of PPO.",
    ),
    "dapo": Preset(
        "DAPO",
        "2503.14476",
        {
            **GROUP,
            **CLIP,
            "clip_high": 0.28,
            **TOKENS,
            "shaping": {"overlong": True, "mask_truncated": True, "filter_zero_variance": True},
        },
        "`shaping.overlong_buffer` is a fifth of `rollout.max_tokens` unless set. Samples that are cut off are not "
        "trained "
        "(overlong filtering), and lower the rewards of their group.",
        figures=(
            "Clips 0.2 and 0.28, mean over tokens, dynamic sampling, overlong filtering and soft overlong punishment: "
            "sections 3.1 to 3.4, equations 8 and 13."
        ),
    ),
    "gspo": Preset(
        "GSPO",
        "2507.18071",
        {**GROUP, "ratio": "sequence_mean", "surrogate": "clip", "clip_low": 3e-4, "clip_high": 4e-4, **SAMPLES},
        figures="Clips 3e-4 and 4e-4 of section 5.1; the ratio is equation 7.",
    ),
    "luspo": Preset(
        "LUSPO",
        "2602.05261",
        {
            **GROUP,
            "ratio": "sequence_mean",
            "surrogate": "clip",
            "clip_low": 2e-3,
            "clip_high": 2.5e-3,
            "aggregate": "sample_weight_length",
        },
        figures="Clips 2e-3 and 2.5e-3 of the paper's experiments.",
    ),
    "cispo": Preset(
        "CISPO",
        "2506.13585",
        {**GROUP, "ratio": "token", "surrogate": "clip_weight", "clip_low": 1.0, "clip_high": 4.0, **TOKENS},
        "A lower bound of `1 - clip_low` = 0 never clips.",
        figures=(
            "The lower bound is off, as in the paper; the upper one, 4, is TRL's and ScaleRL's (arXiv 2510.13786): `1 "
            "+ 4`."
        ),
    ),
    "sapo": Preset(
        "SAPO",
        "2511.20347",
        {**GROUP, "ratio": "token", "surrogate": "gate", "tau_pos": 1.0, "tau_neg": 1.05, **SAMPLES},
        figures="Temperatures 1.0 and 1.05 of the paper's experiments.",
    ),
    "vespo": Preset(
        "VESPO",
        "2602.10693",
        {
            **GROUP,
            "ratio": "sequence_product",
            "surrogate": "gamma",
            "gamma_pos": (2.0, 3.0),
            "gamma_neg": (3.0, 2.0),
            **TOKENS,
        },
        "The weight is a product over tokens: long samples are damped strongly.",
        figures="(k, lambda) of (2, 3) and (3, 2), as in TRL.",
    ),
    "gmpo": Preset(
        "GMPO",
        "2507.20673",
        {**GROUP, "surrogate": "geometric", "clip_low": 0.4, "clip_high": 0.4, **SAMPLES},
        "Bounds are distances of log-ratios.",
        figures="Bounds of +-0.4 in log space, as in the paper.",
    ),
    "dppo_tv": Preset(
        "DPPO, total variation",
        "2602.04879",
        {
            "surrogate": "divergence_mask",
            "divergence": "tv",
            "clip_low": 0.15,
            "clip_high": 0.15,
            **DPPO,
        },
        "Bounds are differences of probabilities. prime-rl and SkyRL bound by 0.2; prime-rl adds `log_ratio_penalty = "
        "1e-3` (arXiv 2602.02276).",
        figures=(
            "verl's recipe: no standard deviation, sums divided by a constant length, ratios up to 1e4, bounds of 0.15."
        ),
    ),
    "dppo_kl": Preset(
        "DPPO, KL",
        "2602.04879",
        {
            "surrogate": "divergence_mask",
            "divergence": "kl",
            "clip_low": 0.05,
            "clip_high": 0.05,
            **DPPO,
        },
        "Bounds are those of the binary KL.",
        figures="verl's recipe, with bounds of 0.05 for the binary KL.",
    ),
    "clip_cov": Preset(
        "Clip-Cov",
        "2505.22617",
        {
            **GROUP,
            "surrogate": "clip_cov",
            "clip_low": 1.0,
            "clip_high": 1.0,
            "covariance_share": 2e-4,
            "covariance_bounds": (1.0, 5.0),
            **TOKENS,
        },
        figures="Share 2e-4 and covariances of 1 to 5, the authors' and verl's; clips of 1 are off.",
    ),
    "kl_cov": Preset(
        "KL-Cov",
        "2505.22617",
        {**GROUP, "surrogate": "kl_cov", "covariance_share": 2e-3, "covariance_coefficient": 1.0, **TOKENS},
        figures=(
            "Share 2e-3 and coefficient 1, as in public copies of the authors' 7B recipe; verl's defaults are 2e-4 "
            "and 0.1."
        ),
    ),
    "p3o": Preset(
        "P3O",
        "2605.12380",
        {**GROUP, "surrogate": "p3o", "proximal": "rollout", **TOKENS},
        figures="Equations of the paper; it has no bounds to choose.",
    ),
    "m2po": Preset(
        "M2PO",
        "2510.01161",
        {**GROUP, "ratio": "token", "surrogate": "second_moment", "second_moment_budget": 0.04, **TOKENS},
        "For data that is many versions old.",
        figures="Budget 0.04 of the authors' scripts; mean over tokens.",
    ),
    "dro": Preset(
        "Direct reward optimisation",
        "2405.19107",
        {"advantage": "group", "scale": "none", "surrogate": "dro", "dro_beta": 0.05, **TOKENS},
        "The baseline is the mean of the group, where the paper learns a value.",
        figures="beta 0.05 of Tinker's example; the paper has no figure for language models of today.",
    ),
    "online_dpo": Preset(
        "Online DPO",
        "2402.04792",
        {
            "advantage": "best_worst",
            "scale": "none",
            "ratio": "none",
            "surrogate": "preference",
            "aggregate": "sample_mean_of_sums",
            "shaping": {"filter_zero_variance": True},
        },
        "The best and the worst sample of a prompt, judged by the reward, are a pair. `pairs` has the losses of `dpo`.",
        figures="beta 0.1 of DPO; the paper compares two answers, a group of two, by a model.",
    ),
    "rloo": Preset(
        "RLOO",
        "2402.14740",
        {"advantage": "rloo", **SCORE, "kl": {"place": "reward", "kind": "k1", "coefficient": 0.03}},
        f"{ON_POLICY} The KL is summed into the reward of the sample, before the baseline.",
        figures="KL coefficient 0.03 of the paper's experiments, as TRL states it.",
    ),
    "reinforce_pp": Preset(
        "REINFORCE++",
        "2501.03262",
        {"advantage": "returns", "scale": "none", "whiten": "tokens", **CLIP, **TOKENS, **KL_IN_REWARD},
        figures="KL with k1 in the reward and whitening over tokens, as in the paper; clip of PPO, coefficient 1e-3.",
    ),
    "reinforce_pp_baseline": Preset(
        "REINFORCE++ with baseline",
        "2501.03262",
        {
            "advantage": "group",
            "scale": "none",
            "whiten": "tokens",
            **CLIP,
            **TOKENS,
            "kl": {"place": "loss", "kind": "k2"},
        },
        figures="KL with k2 in the loss, as in the paper; clip of PPO, coefficient 1e-3.",
    ),
    "remax": Preset(
        "ReMax", "2310.10505", {"advantage": "greedy", **SCORE}, ON_POLICY, figures="The paper has no further figures."
    ),
    "opo": Preset(
        "OPO",
        "2505.23585",
        {"advantage": "length_weighted", **SCORE},
        ON_POLICY,
        figures="The paper has no further figures.",
    ),
    "gpg": Preset(
        "GPG",
        "2504.02546",
        {"advantage": "group", **SCORE, "signal_scale": True},
        ON_POLICY,
        figures="The factor of groups without a signal is that of the paper.",
    ),
    "gdpo": Preset(
        "GDPO",
        "2601.05242",
        {**GROUP, "components": "decoupled", "whiten": "samples", **CLIP, **TOKENS},
        figures="Normalised components whose sum is whitened over the samples of the step; clip of PPO.",
    ),
    "passk": Preset(
        "Best of the group",
        "2503.19595",
        {"advantage": "passk", "scale": "none", **CLIP, **TOKENS},
        'Only the best sample is trained, by its lead. "Pass@k Training" (arXiv 2508.10751) is `pass_at_k`.',
        figures="The leave-one-out estimate of the largest reward; clip of PPO.",
    ),
    "pass_at_k": Preset(
        "Pass@k Training",
        "2508.10751",
        {"advantage": "pass_at_k", "scale": "none", "pass_k": 4, **CLIP, "clip_high": 0.28, **TOKENS},
        "Rewards of 0 and 1, or `correct_reward`; groups of several times `pass_k` samples.",
        figures="Equations 14 and 15 with k = 4; clips of DAPO, which the paper trains with.",
    ),
    "max_rl": Preset(
        "MaxRL",
        "2602.02710",
        {"advantage": "mean_ratio", "scale": "none", **CLIP, **TOKENS},
        figures="The paper has no further figures; clip of PPO.",
    ),
    "echo": Preset(
        "ECHO",
        "2605.24517",
        {**GROUP, **CLIP, **TOKENS, "observation_nll": 0.05},
        "Samples need observations: [environment], [agent], or recorded traces of them. prime-rl's default is 0.1; "
        "Prime Intellect reports a collapse of GLM-4.5-Air at 0.05.",
        figures="Factor 0.05 of the authors' configuration of Qwen3-8B; GRPO with the mean over tokens.",
    ),
    "hierarchical_grpo": Preset(
        "Hierarchical GRPO",
        "https://github.com/PrimeIntellect-ai/prime-rl/blob/main/docs/algorithms.md",
        {"advantage": "group", "scale": "none", **CLIP, **TOKENS},
        "`rivals` names the players that are compared within a sample. No paper is known: the rule is prime-rl's.",
        figures="No standard deviation, as in prime-rl; clip of PPO.",
    ),
    "rae": Preset(
        "Role-conditioned advantage (SPIRAL)",
        "2506.24119",
        {"advantage": "ema", "scale": "none", "ema_decay": 0.95, **CLIP, **TOKENS},
        figures="Decay 0.95 of the paper; clip of PPO.",
    ),
    "optimal_token_baseline": Preset(
        "Optimal token baseline",
        "2602.07078",
        {"advantage": "optimal_token", "scale": "none", **CLIP, **TOKENS},
        figures="The paper has no further figures; clip of PPO.",
    ),
    "optimal_turn_baseline": Preset(
        "Optimal baseline of turns",
        "2602.07078",
        {"advantage": "optimal_turn", "scale": "none", **CLIP, **TOKENS},
        figures="The paper has no further figures; clip of PPO.",
    ),
    "ppo": Preset(
        "PPO",
        "1707.06347",
        {
            "advantage": "gae",
            "scale": "none",
            "gamma": 1.0,
            "gae_lambda": 0.95,
            "whiten": "tokens",
            **CLIP,
            **TOKENS,
            **KL_IN_REWARD,
        },
        figures=(
            "Clip 0.2 and lambda 0.95 of section 6.1, equation 7; KL in the reward as in InstructGPT (arXiv "
            "2203.02155)."
        ),
    ),
    "vapo": Preset(
        "VAPO",
        "2504.05118",
        {
            "advantage": "gae",
            "scale": "none",
            "gae_alpha": 0.05,
            "critic_lambda": 1.0,
            "positive_nll": 0.1,
            **CLIP,
            "clip_high": 0.28,
            **TOKENS,
        },
        "Rewards of 0 and 1, or `correct_reward`. The critic learns whole returns first: `critic.warmup_steps`.",
        figures="alpha 0.05, lambda 1 of the critic, factor 0.1 of correct samples, clips 0.2 and 0.28 and mean "
        "over tokens, as in the paper.",
    ),
    "opd": Preset(
        "On-policy distillation",
        "https://thinkingmachines.ai/blog/on-policy-distillation/",
        {"advantage": "none", "scale": "none", **CLIP, **TOKENS, "distil": {"place": "advantage", "coefficient": 1.0}},
        "The advantage of a token is the log-prob of the teacher minus that of the student: the reverse KL at sampled "
        'tokens. GKD (arXiv 2306.13649) is `distil.place = "loss"` with `kind = "jsd"`; its lambda is '
        "`distil.student_share`.",
        figures=(
            "Coefficient 1. The source trains with plain importance sampling; the clip of PPO changes nothing "
            "on-policy."
        ),
    ),
    "self_distill": Preset(
        "Self-distillation with a hint",
        "2601.19897",
        {"advantage": "none", "scale": "none", **CLIP, **TOKENS, "distil": {"place": "advantage", "coefficient": 1.0}},
        "The teacher is the trained model with a hint in its prompt.",
        figures="Coefficient 1, as in the paper; clip of PPO.",
    ),
}
"""Presets by the value of `algorithm.name`."""
