"""The sections in [algorithm]: KL, entropy, off-policy correction, rejection, distillation, reward shaping."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax_actors.config.sections import (
    Fraction,
    Named,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
)
from relax_actors.registry.catalog import CORRECTIONS

UpperBound = Annotated[float, Field(ge=1)]


class KlSection(Section):
    """[algorithm.kl]: KL penalty to the model at the start of the run, with x = log-prob - reference log-prob."""

    place: Literal["none", "loss", "reward"] = "none"
    """No penalty; a term of the loss of each token; or a part of the token rewards: -`coefficient` x KL with the
    log-probs of sampling, or of `actor_fwd` with `proximal = "actor_fwd"`, without gradient."""
    kind: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator: x; x^2 / 2; or exp(-x) - 1 + x (http://joschu.net/blog/kl-approx.html); or the distance |x|."""
    coefficient: PositiveFloat = 1e-3
    """Factor of the penalty; its initial value with `target`."""
    k2_gradient: bool = False
    """Take the gradient of k2 with the value of `kind`: on-policy, k2 has the gradient of the KL."""
    clamp: PositiveFloat | None = None
    """Bound of the magnitude of a token's KL, which has no gradient beyond it; 10 with `kind = "k3"` is "low-variance
    KL". Unbounded if not set."""
    unbiased: bool = False
    """Multiply a token's KL by the ratio of its probability to that of the proximal policy, with its gradient (arXiv
    2512.02556)."""
    target: PositiveFloat | None = None
    """KL of a sample that the coefficient is adapted to after each step (arXiv 1909.08593), by the mean over the
    updates of its batch; constant if not set."""
    horizon: Positive = 10_000
    """Samples over which the coefficient adapts to `target`."""


class EntropySection(Section):
    """[algorithm.entropy]: entropy over the whole vocabulary, at the sampling temperature."""

    coefficient: NonNegative = 0.0
    """Factor of the entropy bonus, which is subtracted from the loss; its initial value with `target`."""
    target: PositiveFloat | None = None
    """Entropy in nats that the coefficient is adapted to by `delta` a step (arXiv 2505.22312), by the mean over the
    updates of its batch; constant if not set."""
    delta: PositiveFloat = 5e-3
    """Change of the coefficient at each step, with `target`."""
    quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the tokens with the highest entropy that the policy loss trains (arXiv 2506.01939); 1 is all. With
    `surrogate = "geometric"` the geometric mean of a sample is over these tokens."""


class CorrectionSection(Section):
    """[algorithm.correction]: off-policy weight of the policy loss, from w = proximal / rollout probability; with
    `surrogate = "score"`, which has no ratio, w = trained / rollout probability.
    """

    kind: Annotated[str, Named(CORRECTIONS)] = "none"
    """Weight: 1; `importance`, w (arXiv 2110.00641); `tis`, w truncated at `high`, and at `low` if that is set;
    `icepop`, w within `low` and `high`, else 0 (arXiv 2510.18855); or the dotted path of your own function."""
    level: Literal["token", "sequence"] = "token"
    """Whether w is the ratio of a token, or the product of the ratios of its sequence."""
    low: Fraction | None = None
    """Lower bound of w. If not set, it is 0.5 for `icepop`, and `tis` has none; `tis` raises smaller w to it."""
    high: UpperBound = 2.0
    """Upper bound of w; 2 is usual for `tis`, 5 for `icepop`."""
    normalise: Literal["none", "tokens", "samples"] = "none"
    """Divide weights by their mean over the tokens or samples of the step."""


class RejectSection(Section):
    """[algorithm.reject]: sequences left out of the loss, by their ratios w = trainer / rollout probability."""

    kind: Literal["none", "geometric", "max", "product", "k2", "k3"] = "none"
    """Reject by the geometric mean of w over tokens, by w of any token, by the product of w, or by the mean over tokens
    of an estimate of the KL to the rollout: k2, (log w)^2 / 2, or k3, w - 1 - log w. With `proximal = "actor_fwd"` and
    a policy loss other than `score`, w is the probability of that role over the rollout's."""
    low: Fraction = 0.5
    """Lower bound of w."""
    high: UpperBound = 2.0
    """Upper bound of w."""
    max_kl: PositiveFloat = 0.01
    """Largest mean of k2 or k3 that is trained."""
    counted: bool = False
    """Whether the loss is divided by the tokens or samples of rejected sequences, too, as in slime and TRL, so that
    rejected data make the update smaller. Otherwise it is a mean over what is trained, as in verl."""
    opsm: PositiveFloat | None = None
    """Off-policy sequence masking (arXiv 2512.02556): drop the policy loss of a sequence with a negative advantage
    whose mean log-ratio of proximal to trained policy exceeds this, e.g. 1e-4. Its tokens count. Off if not set."""


class DistilSection(Section):
    """[algorithm.distil]: distillation from the role `teacher`."""

    place: Literal["none", "advantage", "loss"] = "none"
    """No distillation; `coefficient` x (teacher - rollout log-prob) added to each token's advantage; or a divergence
    added to each token's loss."""
    kind: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """Divergence with `place = "loss"`: KL(student || teacher); KL(teacher || student); or the generalised JSD (arXiv
    2306.13649) of both with their mixture."""
    teacher_weight: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture of `jsd`."""
    top_k: Positive | None = None
    """Number of the teacher's most likely tokens at each token that the divergence covers. If not set, `reverse_kl` is
    estimated at the sampled token; the others need it."""
    tail: Literal["bucket", "renormalise", "drop"] = "bucket"
    """The rest of the vocabulary: one more outcome of the divergence; left out after dividing the probabilities of the
    `top_k` tokens by their sum; or left out."""
    coefficient: PositiveFloat = 1.0
    """Factor of the signal or loss."""
    student_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the training rows whose samples the student writes, lambda of GKD (arXiv 2306.13649); the teacher writes
    those of the others, in the actors of [rollout]."""

    @model_validator(mode="after")
    def _kind_has_its_tokens(self) -> DistilSection:
        if self.place == "loss" and self.kind != "reverse_kl" and self.top_k is None:
            msg = (
                f'kind = "{self.kind}" compares distributions and needs top_k, e.g. 64; only "reverse_kl" can be '
                "estimated at the sampled token"
            )
            raise ValueError(msg)
        return self


PairLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "apo_zero",
    "apo_down",
    "sppo_hard",
    "bco_pair",
    "discopop",
    "sigmoid_norm",
    "aot",
    "aot_unpaired",
    "sft",
    "cpo",
    "simpo",
    "odds_ratio",
]
OVER_STEP = ("sft", "aot", "aot_unpaired")
"""Losses of pairs that need numbers of the whole step."""
WITHOUT_REFERENCE = ("sft", "cpo", "simpo", "odds_ratio")
"""Losses of pairs that read no log-probs of a reference."""
OF_SCORES = ("sigmoid", "hinge", "ipo", "robust", "exo_pair", "discopop", "sigmoid_norm")
"""Losses of pairs that read the scores of `f_divergence`."""
PAIR_SETTINGS: dict[str, tuple[str, ...]] = {
    "label_smoothing": ("robust", "exo_pair", "aot", "aot_unpaired", "cpo", "simpo"),
    "tau": ("discopop",),
    "gamma": ("simpo",),
    "alpha": ("cpo", "simpo"),
    "f_divergence": OF_SCORES,
    "f_alpha": OF_SCORES,
}
"""Losses of pairs that read a setting of [algorithm.pairs]; all others are read by each loss or for it."""


class PairsSection(Section):
    """[algorithm.pairs]: the loss of pairs of a chosen and a rejected answer."""

    losses: dict[PairLoss, PositiveFloat] = Field(default={"sigmoid": 1.0}, min_length=1)
    """Losses of a pair with their weights, which are added up; several are a mixed preference optimisation (arXiv
    2411.10442). `cpo`, `simpo`, `odds_ratio` and `sft` need no reference."""
    beta: PositiveFloat = 0.1
    """Factor of the log-ratios to the reference, or of log-probs in losses without one; with `ipo` its tau."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that the answers of a pair are interchanged; read by `robust`, `exo_pair`, `aot`, `aot_unpaired`,
    `cpo` and `simpo`."""
    tau: PositiveFloat = 0.05
    """Temperature of the mixture in `discopop`."""
    gamma: NonNegative = 0.5
    """Margin between the answers in `simpo`."""
    alpha: float = 0.0
    """Shape of the reward in `cpo` and `simpo` (AlphaPO, arXiv 2501.03884): (1 - p^-alpha) / alpha, with p the
    exponential of the log-prob of an answer, its mean over tokens in `simpo`; 0 is the log-prob itself."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """Divergence from the reference that the answers are scored by (f-DPO, arXiv 2309.16240), in the losses of a
    difference or of means: `sigmoid`, `hinge`, `ipo`, `robust`, `exo_pair`, `discopop` and `sigmoid_norm`."""
    f_alpha: Annotated[float, Field(gt=0)] = 0.5
    """alpha of `f_divergence = "alpha"`; 1 is the reverse KL."""
    ld_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    """Weight of the log-probs of tokens beyond the length of the shorter answer of the pair (LD-DPO, arXiv 2409.06411),
    in all losses but `sft`; 1, the default behaviour, weighs all tokens equally."""
    weighted: bool = False
    """Weigh a pair by how likely the policy is to write both answers itself (WPO, arXiv 2406.11827): the product of
    exp(mean over tokens of log p - log sum_v p(v)^2) of the two, without gradient."""

    @property
    def needs_reference(self) -> bool:
        """Whether a loss reads log-probs of the reference."""
        return any(name not in WITHOUT_REFERENCE for name in self.losses)

    @model_validator(mode="after")
    def _weighs_pairs(self) -> PairsSection:
        if self.weighted and (over := [name for name in OVER_STEP if name in self.losses]):
            msg = f'weighted = true weighs pairs, and "{over[0]}" is a loss over the whole step; leave out one of them'
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _exo_has_noise(self) -> PairsSection:
        if "exo_pair" in self.losses and not self.label_smoothing:
            msg = 'losses has "exo_pair", which divides by label_smoothing; set label_smoothing, such as 1e-3'
            raise ValueError(msg)
        return self


class LabelsSection(Section):
    """[algorithm.labels]: the loss of answers that are labelled as good or bad."""

    loss: Literal["kto", "apo_zero"] = "kto"
    """KTO, which compares an answer with the KL of the step, estimated on answers to other prompts (arXiv 2402.01306);
    or the unpaired APO-zero, which does not (arXiv 2408.06266)."""
    beta: PositiveFloat = 0.1
    """Factor of the log-ratios to the reference."""
    good_weight: PositiveFloat = 1.0
    """Weight of good answers."""
    bad_weight: PositiveFloat = 1.0
    """Weight of bad answers."""


class ScoresSection(Section):
    """[algorithm.scores]: the scores of a reward model, with `head = "scores"`."""

    classes: Positive = 1
    """Number of scores of an answer or step. One is the score itself, and of labelled answers and steps the logit of a
    good one; several are logits of classes, and a label is the number of its class, from 0."""
    centring: NonNegative = 0.0
    """Factor of the squared sum of the two scores of a pair, which holds scores near 0 (arXiv 2312.09244); 0.01 is
    usual."""


class ShapingSection(Section):
    """[algorithm.shaping]: changes of rewards, rows and trained tokens before the advantages."""

    filter_zero_variance: bool = False
    """Drop and refill rows without a signal (dynamic sampling, arXiv 2503.14476): all samples have the same reward,
    before penalties of length and KL, and the baseline comes from the group; or all advantages are 0."""
    overlong: bool = False
    """Lower the reward of a sample linearly over the last `overlong_buffer` tokens before `rollout.max_tokens` (arXiv
    2503.14476). For episodes with [environment] the limit is `environment.token_budget`, which counts observations."""
    overlong_buffer: Positive | None = None
    """Tokens over which `overlong` lowers the reward; a fifth of the limit if not set."""
    overlong_factor: PositiveFloat = 1.0
    """Penalty of a sample that reaches the limit; no sample has a larger one."""
    length_penalty: NonNegative = 0.0
    """Subtract this times the mean reward of the group times the sample's length over the longest of the group."""
    mask_truncated: bool = False
    """Leave samples that `rollout.max_tokens` cut off out of the loss; their rewards still count in the group."""
