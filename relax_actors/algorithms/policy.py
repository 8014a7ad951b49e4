"""What a policy loss reads and returns, and the ratios of tokens and samples.

A policy loss is a pure function `loss(inputs: PolicyInputs, *, setting, ...) -> PolicyLoss | Tensor`. It returns one
value for each token; the engine weighs, masks and aggregates them. Keyword-only arguments are settings of [algorithm].

Invariant: a token's loss depends on its own values, and on other tokens only through `PolicyInputs.sample_sum`,
`PolicyInputs.row_sum` and `PolicyInputs.step_sum`. Their totals are constants without gradient, which a forward pass
collects before the backward pass. Loss and gradient of a step are therefore the same however it is cut into
micro-batches or shared by ranks, and a sample may consist of several sequences in different micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, assert_never

from relax_actors.algorithms.losses import MAX_LOG_RATIO, check_same_shape

if TYPE_CHECKING:
    from torch import Tensor

RatioLevel = Literal["token", "sequence_mean", "sequence_product", "none"]
RATIOS = {
    "token": ("R = exp(lp - old), of each token", r"\rho_t = \exp(\ell_t - \ell^{\text{old}}_t)"),
    "sequence_mean": (
        "R = exp(mean over the sample of (lp - old))",
        r"\rho = \exp\left(\frac{1}{|y|} \sum_t (\ell_t - \ell^{\text{old}}_t)\right)",
    ),
    "sequence_product": (
        "R = exp(sum over the sample of (lp - old))",
        r"\rho = \exp\left(\sum_t (\ell_t - \ell^{\text{old}}_t)\right)",
    ),
}
"""Formulas of the importance ratios."""
ROLLOUT_RATIO = (
    "R = exp(lp - rollout), of each token",
    r"\rho_t = \exp(\ell_t - \ell^{\text{rollout}}_t)",
)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Policy loss of each token.

    Attributes:
        loss: `[batch, seq] float32`, carries the gradient.
        clipped: `[batch, seq] bool`, true where a bound replaced or dropped the token's ratio.
        ratio: `[batch, seq] float32`, importance ratio, detached.
        weighted: whether `loss` contains the weights of the off-policy correction; else the engine multiplies by them.
    """

    loss: Tensor
    clipped: Tensor
    ratio: Tensor
    weighted: bool = False
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    """Measurements of samples by name, `[batch] float32`; a step reports their means."""


@dataclass(slots=True)
class Totals:
    """Sums over whole samples and the step, collected before the backward pass.

    Attributes:
        recorded: sums over the tokens of each sequence by name, `[batch] float64`, filled while a function runs.
        terms: terms of the sums over samples by name, `[batch, seq]`, filled while a function runs.
        samples: sums over each sequence's sample by name, `[batch] float64`; missing names are sums of the sequence.
        step: sums over the step by name; missing names are sums of the micro-batch; None if the function does not
            declare `whole_step`.
        row: `[batch] int64`, row of each sequence; None if the function declares no `over_row`.
        rows: sums over each sequence's row by name, `[batch] float64`; missing names are sums of the micro-batch.
        by_row: sums over each row of the step by name, `[rows] float64`; missing names are those of the micro-batch.
        row_number: `[batch] int64`, place of the row of each sequence in `by_row`; None without `by_row`.
    """

    recorded: dict[str, Tensor] = field(default_factory=dict)
    terms: dict[str, Tensor] = field(default_factory=dict)
    samples: Mapping[str, Tensor] = field(default_factory=dict)
    step: Mapping[str, float] | None = field(default_factory=dict)
    row: Tensor | None = None
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    by_row: Mapping[str, Tensor] = field(default_factory=dict)
    row_number: Tensor | None = None

    def all_rows(self, name: str) -> tuple[Tensor, Tensor]:
        """Return `row_sum` of all rows, `[rows] float64`, and each own row's place, `[batch]`.

        Raises:
            ValueError: the function does not declare `over_row`, or has made no such sum.
        """
        if self.row is None or name not in self.recorded:
            msg = f"all_rows({name!r}) needs row_sum({name!r}) before it, and @LossSpec(over_row=True, whole_step=True)"
            raise ValueError(msg)
        if name in self.by_row and self.row_number is not None:
            return self.by_row[name], self.row_number
        import torch  # noqa: PLC0415 facts of losses are read without torch

        rows, numbers = torch.unique(self.row, return_inverse=True)
        own = self.recorded[name]
        return own.new_zeros(len(rows)).index_add(0, numbers, own), numbers

    def row_sum(self, name: str, values: Tensor, mask: Tensor) -> Tensor:
        """Return sums over each sequence's row, `[batch, 1]`, without gradient.

        Raises:
            ValueError: the function does not declare `over_row`.
        """
        if self.row is None:
            msg = f"row_sum({name!r}) needs whole rows; mark the policy loss with @LossSpec(over_row=True)"
            raise ValueError(msg)
        own = self._record(name, values, mask)
        sums = self.rows.get(name)
        if sums is None:
            sums = (self.row.unsqueeze(-1) == self.row).to(own.dtype) @ own
        return sums.to(values.dtype).unsqueeze(-1)

    def sample_sum(self, name: str, values: Tensor, mask: Tensor) -> Tensor:
        """Return sums over each sequence's sample, `[batch, 1]`, without gradient."""
        own = self._record(name, values, mask)
        self.terms[name] = values.detach()
        return self.samples.get(name, own).to(values.dtype).unsqueeze(-1)

    def step_sum(self, name: str, values: Tensor, mask: Tensor) -> Tensor:
        """Return the sum over all trained tokens of the step, `[] float64`.

        Raises:
            ValueError: the function does not declare `whole_step`.
        """
        if self.step is None:
            msg = f"step_sum({name!r}) needs the whole step; mark the policy loss with @LossSpec(whole_step=True)"
            raise ValueError(msg)
        own = self._record(name, values, mask)
        return own.new_tensor(self.step[name]) if name in self.step else own.sum()

    def _record(self, name: str, values: Tensor, mask: Tensor) -> Tensor:
        own = values.detach().masked_fill(~mask, 0.0).double().sum(-1)
        self.recorded[name] = own
        return own


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Trained tokens of the sequences of a micro-batch, padded; `[batch, seq]` unless noted.

    Attributes:
        logprobs: float32, of the trained policy, with gradient.
        proximal: float32, log-probs of the policy in the denominator of the ratio, detached.
        rollout: float32, log-probs that the tokens were sampled with.
        advantages: float32, detached.
        mask: bool, true for trained tokens, false for padding.
        log_ratio: float32, log of the ratio of `algorithm.ratio`, with gradient; see `log_ratio`.
        weights: float32, weights of the off-policy correction, detached; 1 without a correction.
        sample_tokens: `[batch] int64`, trained tokens of the whole sample of each sequence.
        selected: bool, tokens that a choice over the whole step selected; None without such a choice.
        totals: sums of whole samples and of the step.
        reference: float32, log-probs of the reference model; None without one.
        row_tokens: `[batch] int64`, trained tokens of all samples of the row of each sequence.
        squares: float32, sum of the squared probabilities of the vocabulary, detached; None if the loss reads none.
        scores: `[batch, seq, classes] float32`, of a reward model, with gradient; `logprobs` are the first.
        targets: float32, what the scores are compared with: the class of a label, or the margin of a pair.
    """

    logprobs: Tensor
    proximal: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor
    log_ratio: Tensor
    weights: Tensor
    sample_tokens: Tensor
    selected: Tensor | None = None
    totals: Totals = field(default_factory=Totals)
    reference: Tensor | None = None
    row_tokens: Tensor | None = None
    squares: Tensor | None = None
    scores: Tensor | None = None
    targets: Tensor | None = None

    @classmethod
    def of(
        cls,
        logprobs: Tensor,
        proximal: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        level: RatioLevel = "token",
        **others: Any,
    ) -> PolicyInputs:
        """Build the inputs of a policy loss.

        Args:
            logprobs: `[batch, seq] float32`, with gradient.
            proximal: `[batch, seq] float32`.
            advantages: `[batch]` or `[batch, seq] float32`.
            mask: `[batch, seq] bool`.
            level: ratio of a token or of a sample; see `log_ratio`.
            others: `rollout` (default: `proximal`), `weights` (1), `sample_tokens` (those of the sequence), `selected`,
                `totals`, `reference`, `row_tokens` (those of the sample), `squares`, `scores`, `targets`.

        Raises:
            ValueError: shapes do not match.
        """
        check_same_shape(logprobs, proximal)
        check_same_shape(logprobs, mask)
        spread = advantages.detach()
        if spread.ndim == 1:
            spread = spread.unsqueeze(-1)
        if spread.shape not in {logprobs.shape, (len(logprobs), 1)}:
            msg = (
                f"advantages {list(advantages.shape)} do not match log-probs {list(logprobs.shape)}; pass one value "
                "for each sequence or each token"
            )
            raise ValueError(msg)
        proximal, totals = proximal.detach(), others.get("totals") or Totals()
        counts, weights, rollout = others.get("sample_tokens"), others.get("weights"), others.get("rollout")
        counts = mask.sum(-1) if counts is None else counts
        return cls(
            logprobs,
            proximal,
            proximal if rollout is None else rollout.detach(),
            spread.expand_as(logprobs),
            mask,
            log_ratio(logprobs, proximal, mask, counts, level=level, totals=totals),
            proximal.new_ones(proximal.shape) if weights is None else weights.detach(),
            counts,
            others.get("selected"),
            totals,
            others.get("reference"),
            counts if others.get("row_tokens") is None else others["row_tokens"],
            others.get("squares"),
            others.get("scores"),
            others.get("targets"),
        )

    @property
    def scored(self) -> tuple[Tensor, Tensor]:
        """`scores` and `targets`; raises ValueError without them."""
        if self.scores is None or self.targets is None:
            msg = 'this loss reads scores and their targets; set algorithm.head = "scores", and label the data'
            raise ValueError(msg)
        return self.scores, self.targets

    @property
    def no_token(self) -> Tensor:
        """False for each token, `[batch, seq] bool`: nothing was clipped."""
        return self.mask.new_zeros(self.mask.shape)

    @property
    def ratio(self) -> Tensor:
        """Importance ratio `exp(log_ratio)`, with gradient."""
        return self.log_ratio.exp()

    def sample_sum(self, name: str, values: Tensor) -> Tensor:
        """Return `values` summed over each sequence's whole sample, without gradient.

        Args:
            name: unique name of the sum within the function.
            values: `[batch, seq]`; they must not depend on another `sample_sum` or `step_sum`.

        Returns:
            `[batch, 1]`, to broadcast over tokens.
        """
        return self.totals.sample_sum(name, values, self.mask)

    def row_sum(self, name: str, values: Tensor) -> Tensor:
        """Return `values` summed over each sequence's row, as `sample_sum`.

        It needs a function that declares `over_row`.
        """
        return self.totals.row_sum(name, values, self.mask)

    def all_rows(self, name: str) -> tuple[Tensor, Tensor]:
        """Return `row_sum` of all rows of the step, `[rows] float64`, and own rows' places.

        It needs a function that declares `over_row` and `whole_step`. In the pass that collects the sums, the rows are
        those of the micro-batch.
        """
        return self.totals.all_rows(name)

    def step_sum(self, name: str, values: Tensor) -> Tensor:
        """Return `values` summed over the step; the function declares `whole_step`.

        In the pass that collects the sums it is that of the micro-batch, and 0 if this has no token.

        Args:
            name: unique name of the sum within the function.
            values: `[batch, seq]`; they must not depend on another `sample_sum` or `step_sum`.

        Returns:
            `[] float64`, without gradient.
        """
        return self.totals.step_sum(name, values, self.mask)


def log_ratio(
    logprobs: Tensor,
    proximal: Tensor,
    mask: Tensor,
    sample_tokens: Tensor,
    *,
    level: RatioLevel,
    totals: Totals,
) -> Tensor:
    """Compute the log of the importance ratio at each token, with `d = logprobs - proximal`.

    - "token": `d`, clamped to +-`MAX_LOG_RATIO`; no gradient beyond.
    - "sequence_mean": `mean(d)` over the sample: the ratio is the geometric mean of the tokens' ratios (GSPO, arXiv
      2507.18071).
    - "sequence_product": `sum(d)` over the sample: the ratio is that of the whole sample (RLOO, arXiv 2402.14740).
    - "none": 0, with the gradient of `logprobs`.

    A sample's ratio s has the same value at all of its tokens, and at each token the gradient of this token alone, as
    in GSPO-token (section 4.3): `sg(s) exp(lp - sg(lp))`. The mean over the sample's tokens then has the gradient of s
    itself. The log of s is clamped to +-`MAX_LOG_RATIO`, and keeps its gradient beyond.

    Args:
        logprobs: `[batch, seq] float32`, of the trained policy.
        proximal: `[batch, seq] float32`.
        mask: `[batch, seq] bool`, tokens that count.
        sample_tokens: `[batch] int64`, trained tokens of the whole sample.
        level: of which ratio.
        totals: sums of whole samples.

    Returns:
        `[batch, seq] float32`, with gradient.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(logprobs, proximal)
    match level:
        case "token":
            return (logprobs - proximal.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        case "none":
            return logprobs - logprobs.detach()
        case "sequence_mean" | "sequence_product":
            count = sample_tokens.clamp(min=1).unsqueeze(-1).to(logprobs.dtype)
            total = totals.sample_sum("log_ratio", (logprobs - proximal).detach(), mask)
            gradient = logprobs - logprobs.detach()
            if level == "sequence_mean":
                return (total / count).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + gradient
            return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + count * gradient
        case _:
            assert_never(level)
