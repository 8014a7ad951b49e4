"""Presets of rows from the data: examples, pairs of answers, and labelled answers."""

from __future__ import annotations

from relax_actors.config.preset import EXAMPLES, PAIRS, TOKENS, Preset

OF_DATA: dict[str, Preset] = {
    "sft": Preset(
        "Supervised fine-tuning", "2203.02155", {**EXAMPLES, "surrogate": "nll", **TOKENS}, figures="It has no figures."
    ),
    "dft": Preset(
        "Dynamic fine-tuning", "2508.05629", {**EXAMPLES, "surrogate": "dft", **TOKENS}, figures="It has no figures."
    ),
    "dpo": Preset(
        "Direct preference optimisation",
        "2305.18290",
        PAIRS,
        "`pairs.losses` has the losses of its relatives, and mixtures of several.",
        figures="beta 0.1 of the paper's experiments; the loss is equation 7.",
    ),
    "simpo": Preset(
        "SimPO",
        "2405.14734",
        {**PAIRS, "pairs": {"losses": {"simpo": 1.0}, "beta": 2.0, "gamma": 1.0}},
        figures="beta 2 and margin 1, within the ranges that the paper tries.",
    ),
    "cpo": Preset(
        "CPO",
        "2401.08417",
        {**PAIRS, "pairs": {"losses": {"cpo": 1.0, "sft": 1.0}}},
        figures="The log-likelihood of the chosen answer has weight 1, as in the paper; beta 0.1.",
    ),
    "orpo": Preset(
        "ORPO",
        "2403.07691",
        {**PAIRS, "pairs": {"losses": {"odds_ratio": 0.1, "sft": 1.0}}},
        figures="Weight 0.1 of the odds ratio, as in the paper's experiments.",
    ),
    "reward_model": Preset(
        "Reward model of pairs (Bradley-Terry)",
        "2203.02155",
        {**PAIRS, "head": "scores", "surrogate": "bradley_terry"},
        "A field `margin` of a row is the least difference of its scores (arXiv 2307.09288).",
        figures="It has no figures; `scores.centring` is off, as in the paper.",
    ),
    "outcome_reward": Preset(
        "Reward model of labelled answers",
        "2110.14168",
        {**EXAMPLES, **TOKENS, "rows": "labelled", "head": "scores", "surrogate": "answer_class"},
        "A row has an answer and a field `label`: true or false, or the number of a class.",
        figures="It has no figures; the score is read at the last token alone.",
    ),
    "process_reward": Preset(
        "Process reward model",
        "2305.20050",
        {**EXAMPLES, **TOKENS, "rows": "steps", "head": "scores", "surrogate": "step_class", "scores": {"classes": 2}},
        "A row has `steps`, a list of texts, or an answer with separators, and `labels`, one for each step.",
        figures="Two classes of steps, as in TRL; the paper has a third, neutral one.",
    ),
    "kto": Preset(
        "KTO",
        "2402.01306",
        {**PAIRS, "rows": "labelled", "surrogate": "unpaired"},
        "A row has an answer and a field `label`, true or false.",
        figures="beta 0.1 and equal weights, as in the paper.",
    ),
}
"""Presets by the value of `algorithm.name`."""
