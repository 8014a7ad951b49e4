"""Numbers of whole samples and steps for the loss, from a forward pass of an engine before its backward passes.

`SequenceRecord`s of a step are collected by the index of the sequence in the step, on all ranks, so that the numbers
follow from the sequences alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.policy import Totals
from relax_actors.algorithms.sequence_records import (
    SequenceRecord,
    StepFacts,
    choose_tokens,
    most_uncertain,
    of_selected,
    sum_records,
)
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.torch.loss_inputs import LossInputs, ScoredTokens, TeacherInputs
from relax_actors.engines.torch.objective import StepObjective

Array = NDArray[Any]
Records = dict[int, SequenceRecord]
"""Records by the index of the sequence."""


def needs_records(objective: StepObjective, samples: Sequence[TrainSample], *, keeps_rows: bool = False) -> bool:
    """Whether the loss needs numbers of samples or rows whose sequences may be in different micro-batches or ranks.

    With `keeps_rows`, all sequences of a row are in one micro-batch.
    """
    of_samples = objective.needs_sample_sums and any(_has_others(sample) for sample in samples)
    of_rows = objective.needs_row_sums and len({sample.row for sample in samples}) < len(samples)
    return objective.needs_whole_step or of_samples or (of_rows and not keeps_rows)


def loss_inputs(
    objective: StepObjective,
    samples: Sequence[TrainSample],
    scored: ScoredTokens,
    mask: Tensor,
    padded: Callable[[Sequence[Array]], Tensor],
    *,
    facts: StepFacts | None = None,
    indices: Sequence[int] = (),
    reference: Tensor | None = None,
) -> LossInputs:
    """Assemble the inputs of the loss for a micro-batch.

    Args:
        objective: loss of the step.
        samples: sequences of the micro-batch.
        scored: what the trained policy says of their trained tokens.
        mask: `[batch, width] bool`.
        padded: pads one array a sequence, `[trained]` or `[trained, k]`, to `[batch, width]` or `[batch, width, k]`.
        facts: numbers of the step, if the loss needs any.
        indices: position of each sequence in `facts`.
        reference: log-probs of the reference, unless the sequences have them.
    """

    def column(name: str) -> Tensor:
        return padded([sample.masked(name) for sample in samples])

    def flags(of: Sequence[Array] | None) -> Tensor | None:
        return None if of is None else padded([of[index] for index in indices]) > 0

    if samples and samples[0].reference_logprobs is not None:
        reference = column("reference_logprobs")
    given = bool(samples) and samples[0].proximal_logprobs is not None
    counts, of_rows = [[getattr(s, name) or s.trained for s in samples] for name in ("sample_tokens", "row_tokens")]
    teacher = None
    if objective.needs_teacher:
        top = None if scored.top is None else column("teacher_top_logprobs")
        teacher = TeacherInputs(column("teacher_logprobs"), top, scored.top)
    return LossInputs(
        scored.logprobs,
        column("logprobs"),
        column("advantages"),
        mask,
        torch.tensor(counts, dtype=torch.int64, device=mask.device),
        torch.tensor(of_rows, dtype=torch.int64, device=mask.device),
        proximal=column("proximal_logprobs") if given else None,
        reference=reference,
        entropies=scored.entropies,
        scores=scored.scores,
        targets=None if scored.scores is None else column("targets"),
        teacher=teacher,
        squares=scored.squares,
        imitated=column("imitated") if samples and samples[0].imitated is not None else None,
        observed=column("observed") > 0 if samples and samples[0].observed is not None else None,
        selected=flags(facts.selected if facts else None),
        uncertain=flags(facts.uncertain if facts else None),
        totals=_totals(objective, samples, facts, indices, mask.device),
    )


def _totals(
    objective: StepObjective,
    samples: Sequence[TrainSample],
    facts: StepFacts | None,
    indices: Sequence[int],
    device: torch.device,
) -> Totals:
    """Return the sums of the sequences' samples and rows, and of the step."""
    row = torch.tensor([sample.row for sample in samples], device=device) if objective.needs_row_sums else None
    if facts is None:
        return Totals(step={} if objective.needs_whole_step else None, row=row)

    def columns(sums: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
        of = [sums[index] for index in indices] if sums else []
        names = of[0] if of else ()
        return {n: torch.tensor([own[n] for own in of], dtype=torch.float64, device=device) for n in names}

    step = facts.sums if objective.needs_whole_step else None
    return Totals(
        samples=columns(facts.sample_sums),
        step=step,
        row=row,
        rows=columns(facts.row_sums),
        by_row={n: torch.tensor(sums, dtype=torch.float64, device=device) for n, sums in facts.by_row.items()},
        row_number=torch.tensor([facts.row_numbers[i] for i in indices], device=device) if facts.row_numbers else None,
    )


def record(objective: StepObjective, inputs: LossInputs, indices: Sequence[int]) -> Records:
    """Compute the loss of a micro-batch without gradient, and record what the step's numbers follow from.

    Args:
        objective: loss of the step.
        inputs: of the micro-batch, without numbers of the step.
        indices: index of each sequence in the step.
    """
    policy = objective.observe(inputs)
    lengths = inputs.mask.sum(-1).tolist()
    columns = [inputs.logprobs, policy.ratio, inputs.advantages, inputs.entropies]
    arrays = [None if column is None else column.detach().float().cpu().numpy() for column in columns]
    sums = {name: values.tolist() for name, values in inputs.totals.recorded.items()}
    terms = inputs.totals.terms if objective.means_selected else {}
    by_name = {name: values.float().cpu().numpy() for name, values in terms.items()}
    records: Records = {}
    for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
        cut = [np.zeros(0, np.float32) if array is None else array[row, :length] for array in arrays]
        records[index] = SequenceRecord(
            *(cut[0], cut[1], cut[2], cut[3]),
            {name: values[row] for name, values in sums.items()},
            {name: values[row, :length] for name, values in by_name.items()},
        )
    return records


def step_facts(objective: StepObjective, samples: Sequence[TrainSample], records: Records, seed: int) -> StepFacts:
    """Compute the numbers of the step.

    Args:
        objective: loss of the step.
        samples: all sequences whose numbers belong together, in the order of the step.
        records: record of each of them, by index.
        seed: of the random choice of tokens.
    """
    ordered = [records[index] for index in range(len(samples))]
    selected = uncertain = None
    if objective.functions.spec.choose:
        selected = choose_tokens(ordered, partial(objective.functions.choose, seed=seed))
    if objective.top_entropy is not None:
        uncertain = most_uncertain(ordered, objective.top_entropy)
    if uncertain is not None and objective.means_selected:
        ordered = of_selected(ordered, uncertain)
    rows = [sample.row for sample in samples] if objective.needs_row_sums else []
    facts = sum_records(ordered, [_sample_key(index, sample) for index, sample in enumerate(samples)], rows)
    return replace(facts, selected=selected, uncertain=uncertain)


def _has_others(sample: TrainSample) -> bool:
    """Return whether a sequence's sample has other sequences with trained tokens."""
    return sample.sample_tokens not in (0, sample.trained)


def _sample_key(index: int, sample: TrainSample) -> tuple[int, int, int]:
    """Return a key that the sequences of a sample share."""
    return (sample.row, sample.sample, -1) if _has_others(sample) else (sample.row, sample.sample, index)


def pack_records(records: Records) -> list[dict[str, Any]]:
    """Encode records as plain data and arrays, for other ranks."""
    return [
        {
            "index": i,
            "arrays": [r.logprobs, r.ratio, r.advantages, r.entropies, *r.terms.values()],
            "sums": dict(r.sums),
            "terms": list(r.terms),
        }
        for i, r in records.items()
    ]


def unpack_records(messages: Sequence[Mapping[str, Any]]) -> Records:
    """Decode what `pack_records` encoded."""
    records: Records = {}
    for message in messages:
        logprobs, ratio, advantages, entropies, *values = message["arrays"]
        terms = dict(zip(message["terms"], values, strict=True))
        records[int(message["index"])] = SequenceRecord(logprobs, ratio, advantages, entropies, message["sums"], terms)
    return records
