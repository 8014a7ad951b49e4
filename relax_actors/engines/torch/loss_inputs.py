"""What the trained policy says of the tokens of a micro-batch, and what its loss reads, padded."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from relax_actors.algorithms.policy import Totals


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """What the trained policy says of the trained tokens of a micro-batch, with gradient.

    Attributes:
        logprobs: `[batch, width] float32`.
        entropies: `[batch, width] float32`, if they were computed.
        top: `[batch, width, k] float32`, log-probs of the teacher's most likely tokens, if it names any.
        squares: `[batch, width] float32`, sums of squared probabilities, without gradient, if they were computed.
        scores: `[batch, width, classes] float32` of a reward model, in which `logprobs` are the first of them.
    """

    logprobs: Tensor
    entropies: Tensor | None = None
    top: Tensor | None = None
    squares: Tensor | None = None
    scores: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TeacherInputs:
    """Log-probs of a teacher for the tokens of a micro-batch; `[batch, width]` and `[batch, width, k]` float32.

    Attributes:
        logprobs: of the tokens themselves.
        top: of its k most likely tokens at each token; None without `algorithm.distil.top_k`.
        student_top: log-probs of the trained policy at the same k tokens, with gradient.
    """

    logprobs: Tensor
    top: Tensor | None = None
    student_top: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Trained tokens of the sequences of a micro-batch, padded; `[batch, width]` unless noted.

    Attributes:
        logprobs: float32, log-probs of the trained policy, with gradient.
        rollout: float32, log-probs that the tokens were sampled with.
        advantages: float32.
        mask: bool, true for trained tokens, false for padding.
        sample_tokens: `[batch] int64`, trained tokens of the whole sample of each sequence; None if every sample has
            one sequence.
        row_tokens: `[batch] int64`, trained tokens of all samples of the row of each sequence; None if every row has
            one sequence.
        proximal: float32, log-probs of the proximal policy; required if algorithm.proximal is "actor_fwd", and given
            with several updates a batch.
        reference: float32, log-probs of the reference model of the KL, if there is one.
        entropies: float32, with gradient; required if `StepObjective.needs_entropy`.
        selected: bool, tokens that the covariance selected, if the algorithm selects any.
        uncertain: bool, tokens that algorithm.entropy.quantile selected, if it selects any.
        scores: `[batch, width, classes] float32`, with gradient, with algorithm.head = "scores"; `logprobs` are then
            the first of them.
        targets: float32, what the scores are compared with.
        teacher: log-probs of a teacher; required with algorithm.distil.place = "loss".
        imitated: float32, factor of -log-prob of each token in the sum of the losses, with algorithm.positive_nll or
            algorithm.observation_nll.
        observed: bool, tokens of observations, which are in `mask`, too.
        squares: float32, sum of the squared probabilities of the vocabulary, if the loss reads it.
        totals: sums of whole samples and of the step.
    """

    logprobs: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor
    sample_tokens: Tensor | None = None
    row_tokens: Tensor | None = None
    proximal: Tensor | None = None
    reference: Tensor | None = None
    entropies: Tensor | None = None
    selected: Tensor | None = None
    uncertain: Tensor | None = None
    scores: Tensor | None = None
    targets: Tensor | None = None
    teacher: TeacherInputs | None = None
    imitated: Tensor | None = None
    observed: Tensor | None = None
    squares: Tensor | None = None
    totals: Totals = field(default_factory=Totals)

    @property
    def counts(self) -> Tensor:
        """Trained tokens of the whole sample of each sequence, `[batch] int64`."""
        return self.mask.sum(-1) if self.sample_tokens is None else self.sample_tokens

    @property
    def row_counts(self) -> Tensor:
        """Trained tokens of all samples of the row of each sequence, `[batch] int64`."""
        return self.mask.sum(-1) if self.row_tokens is None else self.row_tokens
