"""Conversion of a row's cells to the samples that engines train on or score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import add, mul
from typing import Any

import numpy as np

from broker.codec import Array
from relax_actors.algorithms.shared_prefixes import LEAST_TOKENS
from relax_actors.config.algorithm_parts import DistilSection
from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.errors import CodecError, RelaxError
from relax_actors.messages import NOT_SAMPLED, Advantage, FinishReason, TeacherScores, Trajectory
from relax_actors.messages.experts import join_experts
from relax_actors.messages.trajectory import LABEL

PROXIMAL, REFERENCE, VALUES, TEACHER = "actor_fwd", "reference", "values", "teacher"
"""Columns `[total] float32`: log-probs of the proximal policy, of the reference model of the KL, values; and
`TeacherScores`."""
_FIELDS = {PROXIMAL: "proximal_logprobs", REFERENCE: "reference_logprobs", VALUES: "values"}


@dataclass(frozen=True, slots=True)
class AuxiliaryTerms:
    """What the samples of an update train beside the advantages of their rewards.

    Attributes:
        distil: section [algorithm.distil]; None without a teacher.
        imitation: factor of -log-prob of each token of a correct sample, in the sum of the losses of all tokens.
        observation: factor of -log-prob of each token of an observation, as `imitation`.
    """

    distil: DistilSection | None = None
    imitation: float = 0.0
    observation: float = 0.0


NO_TERMS = AuxiliaryTerms()


def token_advantages(advantage: Advantage, trajectory: Trajectory) -> Array:
    """Return the advantage of every token of a row, `[total] float32`."""
    values, total = np.asarray(advantage.values, np.float32), len(trajectory.token_ids)
    # With empty samples, a row can have as many tokens as samples.
    per_token = advantage.per_token if total == len(trajectory.texts) else len(values) == total
    return values if per_token else np.repeat(values, trajectory.sample_lengths)


def sign_of_samples(trajectory: Trajectory | RelaxError) -> Advantage | RelaxError:
    """Return the advantages of a row from the data: 1 if chosen, -1 if rejected.

    Those of a labelled answer, and of one that is only compared, are in its metric `label`; with `targets` the answer
    is an example. Returns the error of a trajectory that cannot be read.
    """
    if isinstance(trajectory, RelaxError):
        return trajectory
    signs = trajectory.metrics.get(LABEL, [1.0, -1.0][: len(trajectory.texts)])
    return Advantage(np.array(signs, np.float32), 0.0)


def teacher_fields(teacher: TeacherScores, trajectory: Trajectory) -> dict[str, Array]:
    """Return the `TrainSample` fields of a teacher's log-probs, over a row's own tokens."""
    fields = {"teacher_logprobs": teacher.logprobs}
    top = teacher.expanded(trajectory.trained)
    return fields if top is None else fields | {"teacher_top_ids": top[0], "teacher_top_logprobs": top[1]}


def without_truncated(trajectory: Trajectory) -> Trajectory | RelaxError:
    """Return a trajectory that trains no cut-off sample; an error if all were cut off."""
    cut = np.array([reason == FinishReason.LENGTH for reason in trajectory.finish_reasons])
    mask = trajectory.trained & ~np.repeat(cut, trajectory.sample_lengths)
    if not mask.any():
        return CodecError("all trained samples were cut off; algorithm.shaping.mask_truncated leaves nothing to train")
    return replace(trajectory, loss_mask=mask) if cut.any() else trajectory


def observed_tokens(trajectory: Trajectory) -> Array:
    """Return observation tokens after a trained token of their sequence, `[total] bool`.

    Earlier ones are the context of a branch, which another sequence has, too.
    """
    trained, lengths = np.cumsum(trajectory.trained), trajectory.lengths
    before = np.append(0, trained)[np.cumsum(lengths) - lengths]
    observed: Array = (trajectory.versions < 0) & (trained > np.repeat(before, lengths))
    return observed


def has_pair(trajectory: Trajectory, advantage: Advantage) -> bool:
    """Whether a chosen (advantage > 0) and a rejected answer have trained tokens."""
    tokens = token_advantages(advantage, trajectory)[trajectory.trained]
    return bool((tokens > 0).any() and (tokens < 0).any())


def only_pair(trajectory: Trajectory, advantage: Advantage) -> Trajectory:
    """Return a trajectory whose samples with advantage 0 are not trained."""
    unpaired = (token_advantages(advantage, trajectory) == 0) & trajectory.trained
    return replace(trajectory, loss_mask=trajectory.trained & ~unpaired) if unpaired.any() else trajectory


def computed_lengths(trajectory: Trajectory, *, share_prefixes: bool) -> list[int]:
    """Return each sequence's tokens in a micro-batch, at most; see `plan_micro_batches`.

    With `share_prefixes` the prompt counts once. Branches of a sample may share more than the prompt.
    """
    lengths: list[int] = []
    longest, lag = 0, int(trajectory.targets is None)
    for length, prompt_tokens in zip(trajectory.sequence_lengths, trajectory.shared.tolist(), strict=True):
        known = min(prompt_tokens, longest) if share_prefixes else 0
        # Where a model is read before a token, a sequence's last one is no input. Behind a shared prefix every trained
        # token counts, because of its logits.
        lengths.append(length - known if known >= LEAST_TOKENS else max(length - lag, 1))
        longest = max(longest, prompt_tokens)
    return lengths


def samples_of(
    row: int,
    trajectory: Trajectory,
    advantage: Advantage | None = None,
    scores: Mapping[str, Any] | None = None,
    *,
    replays: bool = False,
    terms: AuxiliaryTerms = NO_TERMS,
    media: Sequence[PromptMedia] | None = None,
) -> list[TrainSample]:
    """Convert a row to samples: one for each sequence with trained tokens.

    Args:
        row: index of the row within its step.
        trajectory: samples of the row.
        advantage: advantages and returns of the row; None if the row is only scored.
        scores: log-probs and values of the row, `[total] float32`, and `TeacherScores`, by column.
        replays: whether engines compute with the recorded experts.
        terms: a teacher, and terms that are means over other tokens; see `auxiliary_terms`.
        media: media and positions of each sequence; None for a model that reads text only.
    """
    flat, trained = _flat_fields(trajectory, advantage, dict(scores or {}), terms)
    layout, recorded = _Layout(trajectory), trajectory.expanded_experts() if replays else None
    tokens, mask = layout.tokens(trajectory), layout.spread(trained)
    arrays = {name: layout.spread(array) for name, array in flat.items()}
    arrays["versions"] = layout.spread(trajectory.versions, NOT_SAMPLED)
    sample_tokens, counts = trajectory.trained_lengths.tolist(), trajectory.counts.tolist()
    numbers = [sample for sample, count in enumerate(counts) for _ in range(count)]
    samples = []
    for i, (part, own) in enumerate(zip(layout.parts, layout.own_parts, strict=True)):
        if not layout.is_trained[i]:
            continue
        samples.append(
            TrainSample(
                tokens[part],
                mask[part],
                **{name: array[part] for name, array in arrays.items()},
                routed_experts=None if recorded is None else join_experts(recorded, i, layout.shared[i], own),
                media=None if media is None else media[i],
                row=row,
                sample=numbers[i],
                sample_tokens=sample_tokens[numbers[i]],
                row_tokens=sum(sample_tokens),
            )
        )
    return samples


def _flat_fields(
    trajectory: Trajectory,
    advantage: Advantage | None,
    scores: dict[str, Any],
    terms: AuxiliaryTerms,
) -> tuple[dict[str, Array], Array]:
    """Return fields of samples over own tokens, `[total, ...]`, and the trained tokens."""
    teacher: TeacherScores | None = scores.pop(TEACHER, None)
    flat = {} if trajectory.targets is None else {"targets": trajectory.targets}
    flat |= {"logprobs": trajectory.logprobs} | {_FIELDS[name]: array for name, array in scores.items()}
    if advantage is not None:
        flat["advantages"] = token_advantages(advantage, trajectory)
        if teacher is not None and terms.distil is not None and terms.distil.place == "advantage":
            signal = teacher.logprobs - trajectory.logprobs
            flat["advantages"] = flat["advantages"] + terms.distil.coefficient * signal
        if advantage.returns is not None:
            flat["returns"] = advantage.returns
        if terms.imitation and advantage.correct is not None:
            factors = advantage.correct.astype(np.float32) * terms.imitation
            flat["imitated"] = np.repeat(factors, trajectory.sample_lengths)
    trained = trajectory.trained
    if terms.observation:
        observed = observed_tokens(trajectory)
        factors = flat.get("imitated", np.zeros(len(observed), np.float32))
        trained = trained | observed
        flat |= {"observed": observed, "imitated": np.where(observed, np.float32(terms.observation), factors)}
    if teacher is not None and terms.distil is not None and terms.distil.place == "loss":
        flat |= teacher_fields(teacher, trajectory)
    return flat, trained


class _Layout:
    """Places of a row's tokens when trained sequences begin with their prompt.

    Attributes:
        own_parts: own tokens of each sequence in arrays of the trajectory.
        is_trained: whether each sequence has trained tokens.
        shared: number of prompt tokens of each sequence; 0 without trained tokens.
        parts: tokens of each sequence, prompt included, in the arrays that `tokens` and `spread` return.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        lengths, mask = trajectory.lengths.tolist(), trajectory.loss_mask
        self.own_parts = [slice(begin, end) for begin, end in pairwise([0, *accumulate(lengths)])]
        self.is_trained = list(map(bool, lengths)) if mask is None else [bool(mask[p].any()) for p in self.own_parts]
        self.shared = list(map(mul, trajectory.shared.tolist(), self.is_trained))
        self.parts = [slice(begin, end) for begin, end in pairwise([0, *accumulate(map(add, self.shared, lengths))])]
        counts = [count for both in zip(self.shared, lengths, strict=True) for count in both]
        self._is_own = np.repeat([False, True] * len(lengths), counts)

    def spread(self, array: Array, fill: int = 0) -> Array:
        """Place an array over own tokens, `[total, ...]`, with `fill` at the tokens of prompts."""
        whole = np.full((len(self._is_own), *array.shape[1:]), fill, array.dtype)
        whole[self._is_own] = array
        return whole

    def tokens(self, trajectory: Trajectory) -> Array:
        """Return the tokens of all sequences, prompts included."""
        whole = np.empty(len(self._is_own), np.result_type(trajectory.token_ids, trajectory.prompt_tokens))
        whole[self._is_own] = trajectory.token_ids
        whole[~self._is_own] = np.concatenate([trajectory.prompt_tokens[:shared] for shared in self.shared])
        return whole


def in_layout(trajectory: Trajectory, scored: Iterator[Array]) -> Array:
    """Return log-probs or values in the layout of a trajectory, `[total] float32`.

    `scored` has an array for each sequence with trained tokens, prompt included. Sequences without trained tokens get
    0.
    """
    placed, trained = np.zeros(len(trajectory.token_ids), np.float32), trajectory.trained
    start = 0
    for own in trajectory.lengths.tolist():
        part = slice(start, start + own)
        if trained[part].any():
            placed[part] = next(scored)[-own:]
        start += own
    return placed
