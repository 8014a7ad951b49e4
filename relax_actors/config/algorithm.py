"""The section [algorithm]: advantages, policy loss and their parts, with the defaults of a preset."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relax_actors.config import presets
from relax_actors.config.algorithm_parts import (
    OVER_STEP,
    CorrectionSection,
    DistilSection,
    EntropySection,
    KlSection,
    LabelsSection,
    PairsSection,
    RejectSection,
    ScoresSection,
    ShapingSection,
)
from relax_actors.config.sections import Fraction, Named, NonNegative, Positive, PositiveFloat, Section
from relax_actors.registry.catalog import ADVANTAGES, POLICY_LOSSES


class AlgorithmSection(Section):
    """[algorithm]: the learning algorithm. `relax algorithms` lists the presets."""

    name: str | None = None
    """Preset, e.g. "gspo": fills the settings of [algorithm] that are not set. Without one, the defaults below hold:
    GRPO with the loss averaged over tokens."""

    rows: Literal["sampled", "examples", "pairs", "labelled", "steps"] = "sampled"
    """What a row of the run is: samples that the policy generates for a prompt, with rewards; or from the data an
    example, a pair of a chosen and a rejected answer, an answer with a label, or an answer with a label for each of its
    steps. The preset sets it, and the policy loss must be one for such rows."""
    head: Literal["tokens", "scores"] = "tokens"
    """What the trained model computes: log-probs of tokens, or scores of answers, as a reward model does. The preset
    sets it, and the policy loss must be one for such a model."""
    advantage: Annotated[str, Named(ADVANTAGES)] = "group"
    """Advantage estimator, or the dotted path of your own function. With `environment.credit = "turn"` or "branch",
    `turn` takes the place of `group`."""
    scale: Literal["none", "group_std", "batch_std", "group_mean"] = "group_std"
    """Divisor of the advantages: none, the standard deviation of the rewards of the group or of the step, or the mean
    reward of the group."""
    epsilon: PositiveFloat = 1e-6
    """Added to a standard deviation that divides."""
    pass_k: Positive = 4
    """k of `pass_at_k`: samples of which at least one should be correct; at most `rollout.group_size`."""
    correct_reward: float = 1.0
    """Reward from which a sample is correct, for `pass_at_k` and `positive_nll`."""
    whiten: Literal["none", "tokens", "samples"] = "none"
    """Subtract the mean of the advantages over all trained tokens or samples of the step, then divide by their standard
    deviation. A step then trains when all of its rows are there (no streaming)."""
    components: Literal["sum", "decoupled"] = "sum"
    """Reward components: their weighted sum is the reward; or each is normalised within the group on its own before the
    sum (GDPO, arXiv 2601.05242)."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward component with `components = "decoupled"`; by default that in `reward.function`, or 1."""
    signal_scale: bool = False
    """Multiply advantages by the samples of the step over those in groups with unequal rewards (GPG, arXiv
    2504.02546)."""
    gamma: Fraction = 1.0
    """Discount of later token rewards."""
    gae_lambda: Fraction = 1.0
    """Lambda of generalised advantage estimation (arXiv 1506.02438)."""
    gae_alpha: PositiveFloat | None = None
    """Lambda of a sample with |y| trained tokens is 1 - 1 / (gae_alpha |y|), at least 0, in place of `gae_lambda`
    (length-adaptive GAE, arXiv 2504.05118)."""
    critic_lambda: Fraction | None = None
    """Lambda of the returns that the critic learns (decoupled GAE, arXiv 2503.01491); that of the advantages if not
    set."""
    positive_nll: NonNegative = 0.0
    """Factor of the mean -log-prob over the tokens of correct samples, those with a reward of `correct_reward` or more,
    added to the loss (arXiv 2504.05118). Needs `aggregate = "token_mean"`."""
    rivals: tuple[str, ...] = ()
    """Players of [environment] or [agent] that are compared with each other in the same sample, such as several solvers
    of a task that a proposer made for this sample alone (hierarchical GRPO). Any other player is compared with itself
    in the other samples of the group."""
    observation_nll: NonNegative = 0.0
    """Factor of the mean -log-prob over the tokens of observations, added to the loss (ECHO, arXiv 2605.24517): what an
    environment, a tool or a user wrote behind the first trained token of a sequence."""
    ema_decay: Fraction = 0.95
    """Decay of the running mean reward that is subtracted (arXiv 2506.24119)."""

    ratio: Literal["token", "sequence_mean", "sequence_product", "none"] = "token"
    """Ratio of the trained to the proximal policy: of each token; of a sample, as the geometric mean or the product
    over its tokens; or none."""
    surrogate: Annotated[str, Named(POLICY_LOSSES)] = "clip"
    """Policy loss, or the dotted path of your own function."""
    clip_low: NonNegative = 0.2
    """Lower clip bound, a distance of the ratio from 1; for `divergence_mask` a difference of probabilities, or
    what `divergence` names; for `geometric` a distance of the log-ratio from 0."""
    clip_high: PositiveFloat = 0.2
    """Upper clip bound, as `clip_low`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the ratio for negative advantages (arXiv 1912.09729); off if not set."""
    divergence: Literal["tv", "kl"] = "tv"
    """Divergence of a token that `clip_low` (advantage below 0) and `clip_high` bound: the difference of its
    probabilities, or the binary KL (arXiv 2602.04879)."""
    ratio_cap: Annotated[float, Field(ge=1)] | None = None
    """Largest ratio; unbounded if not set."""
    tau_pos: PositiveFloat = 1.0
    """Temperature for positive advantages (arXiv 2511.20347)."""
    tau_neg: PositiveFloat = 1.05
    """Temperature for other advantages."""
    gamma_pos: tuple[PositiveFloat, PositiveFloat] = (2.0, 3.0)
    """k and lambda for advantages of 0 and more (arXiv 2602.10693)."""
    gamma_neg: tuple[PositiveFloat, PositiveFloat] = (3.0, 2.0)
    """k and lambda for negative advantages."""
    covariance_share: Fraction = 2e-4
    """Share of the tokens that are chosen by covariance (arXiv 2505.22617)."""
    covariance_bounds: tuple[float, float] = (1.0, 5.0)
    """Covariances among which tokens are chosen."""
    covariance_coefficient: PositiveFloat = 0.1
    """Factor of |log-ratio| of the chosen tokens."""
    second_moment_budget: PositiveFloat = 0.04
    """Largest mean of the squared log-ratio over the tokens that the update moves further away from the proximal policy
    (arXiv 2510.01161); those with the largest are dropped."""
    dro_beta: PositiveFloat = 0.05
    """Factor of half the squared log-ratio of each token in `dro` (arXiv 2405.19107)."""
    log_ratio_penalty: NonNegative = 0.0
    """Factor of the squared log-ratio of each trained token, added to the loss (arXiv 2602.02276)."""
    aggregate: Literal[
        "token_mean", "prompt_mean", "sample_mean_of_means", "sample_mean_of_sums", "constant", "sample_weight_length"
    ] = "token_mean"
    """Aggregation of the loss: mean over all tokens of the step (DAPO, arXiv 2503.14476); mean over prompts of the mean
    over all tokens of their samples (ScaleRL, arXiv 2510.13786); mean over samples of the means (GRPO, arXiv
    2402.03300) or sums over their tokens; sum over all tokens divided by the samples of the step times `length` (Dr.
    GRPO, arXiv 2503.20783); or mean over samples of their loss times their length (LUSPO, arXiv 2602.05261)."""
    length: Positive | None = None
    """Tokens that `aggregate = "constant"` divides by; `rollout.max_tokens` if not set."""
    proximal: Literal["rollout", "trainer", "actor_fwd"] = "rollout"
    """Policy in the denominator of the ratio: the log-probs of sampling; the trainer's own before the step (decoupled
    PPO); or the column `actor_fwd`, `[total] float32`, of a role that writes it."""

    reference_every: Positive | None = None
    """Steps after which the reference is refreshed: a row of step s is scored with the newest version that is a
    multiple of this and at most s - `staleness.max`, the versions that are published when it is admitted. Needs
    [roles.reference]. If not set, the reference is the model at the start of the run."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Options of your own policy loss, correction and estimator: their keyword-only parameters that are no settings of
    [algorithm], of the types of their annotations."""

    kl: KlSection = KlSection()
    entropy: EntropySection = EntropySection()
    correction: CorrectionSection = CorrectionSection()
    reject: RejectSection = RejectSection()
    distil: DistilSection = DistilSection()
    pairs: PairsSection = PairsSection()
    labels: LabelsSection = LabelsSection()
    scores: ScoresSection = ScoresSection()
    shaping: ShapingSection = ShapingSection()

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, tree: Any) -> Any:
        """Fill settings that are not set from the preset."""
        return presets.filled(tree) if isinstance(tree, dict) else tree

    def with_lengths(self, max_tokens: int, longest_sample: int) -> AlgorithmSection:
        """Return a copy in which lengths that are needed and not set follow from the longest completion and sample."""
        update: dict[str, Any] = {}
        if self.aggregate == "constant" and self.length is None:
            update["length"] = max_tokens
        if self.shaping.overlong and self.shaping.overlong_buffer is None:
            shaping = {"overlong_buffer": max(1, longest_sample // 5)}
            update["shaping"] = self.shaping.model_copy(update=shaping)
        return self.model_copy(update=update)

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the reference model are needed."""
        return self.kl.place != "none" or self.loss_reads_reference

    @property
    def loss_reads_reference(self) -> bool:
        """Whether the loss reads log-probs of the reference model, for a KL or for pairs."""
        has_pairs = self.rows == "pairs" or self.trains_sampled_pairs
        of_answers = self.rows == "labelled" or (has_pairs and self.pairs.needs_reference)
        return self.kl.place == "loss" or (of_answers and self.head == "tokens")

    @property
    def trains_sampled_pairs(self) -> bool:
        """Whether the best and the worst sample of a row are a pair, and the other samples are not trained."""
        return self.rows == "sampled" and self.surrogate == "preference"

    @property
    def loss_reads_squares(self) -> bool:
        """Whether the loss reads the sums of squared probabilities of the trained policy."""
        return self.surrogate == "preference" and self.pairs.weighted

    @property
    def compares_answers(self) -> bool:
        """Whether the loss of a row from the data is one of several answers, which are trained together."""
        return self.rows == "pairs" or (self.rows == "labelled" and self.head == "tokens")

    @property
    def compares_prompts(self) -> bool:
        """Whether a row holds the answer to another prompt, too, for the KL of KTO."""
        return self.rows == "labelled" and self.head == "tokens" and self.labels.loss == "kto"

    @property
    def trains_scores(self) -> bool:
        """Whether the trained model is a reward model."""
        return self.head == "scores"

    @property
    def pairs_need_whole_step(self) -> bool:
        """Whether a loss of pairs needs numbers of the whole step."""
        return self.surrogate == "preference" and any(name in OVER_STEP for name in self.pairs.losses)
