"""Check of a policy loss: shape, finiteness, gradient, and invariance to cuts.

Everything is computed in float64 on a made-up step: samples of 1 to 9 tokens, one of them in two sequences, equal and
large ratios, advantages of both signs and 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from relax_actors.algorithms.corrections import TokenWeights
from relax_actors.algorithms.losses import reduce_loss
from relax_actors.algorithms.own_options import SETTINGS, arguments_of
from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss, RatioLevel, Totals
from relax_actors.algorithms.policy_functions import PolicyFunctions, checked_loss
from relax_actors.algorithms.sequence_records import SequenceRecord, StepFacts, sum_records
from relax_actors.algorithms.specs import loss_spec
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.errors import ConfigError

TOLERANCE = 1e-6
TRIED_TOLERANCE = 1e-4
"""Difference between cuts that is refused before a run: a function may compute in float32."""
STEP = 1e-6
"""Half the difference of a log-prob in a finite difference."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Sequences of a step: `[sequences, tokens] float64`, mask, samples, and rows.

    With `classes` above 0 the log-probs are the first of as many scores, and the others follow from them.
    """

    logprobs: Tensor
    proximal: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor
    samples: tuple[int, ...]
    rows: tuple[int, ...] = ()
    classes: int = 0

    def counts(self) -> Tensor:
        """Return the trained tokens of each sequence's sample."""
        own = self.mask.sum(-1)
        same = torch.tensor([[a == b for b in self.samples] for a in self.samples])
        return (same * own).sum(-1)

    def in_float32(self) -> _Step:
        """Return the step in the precision of an engine."""
        logprobs, proximal, rollout, advantages = (
            values.float() for values in (self.logprobs, self.proximal, self.rollout, self.advantages)
        )
        return replace(self, logprobs=logprobs, proximal=proximal, rollout=rollout, advantages=advantages)


def check_policy_loss(
    function: Callable[..., PolicyLoss | Tensor], *, ratio: RatioLevel = "token", **settings: Any
) -> None:
    """Check a policy loss on three made-up steps, in float64.

    - It returns one finite number for each token, with a gradient.
    - The gradient equals finite differences to 1e-5. What the function detaches is a constant for both.
    - Loss and gradient of a step are the same to 1e-6 for any cut into micro-batches and any padding.

    Args:
        function: the policy loss.
        ratio: value of algorithm.ratio.
        settings: other settings of [algorithm] and options by name, for the function's keyword-only parameters.

    Raises:
        AssertionError: the gradient is wrong, or loss or gradient depend on the cut.
        ConfigError: the function returned a wrong shape or a number that is not finite, or an option is missing or of
            the wrong type.
    """
    options = {name: value for name, value in settings.items() if name not in SETTINGS}
    given = {name: value for name, value in settings.items() if name in SETTINGS}
    bound = arguments_of(function, AlgorithmSection(ratio=ratio, options=options, **given))

    def call(inputs: PolicyInputs) -> Tensor:
        loss = function(inputs, **bound)
        return checked_loss(loss, inputs.mask, _name(function))

    spec = loss_spec(function)
    classes = AlgorithmSection(**given).scores.classes if spec.head == "scores" else 0
    for seed in range(3):
        step = _made_up(seed, ratio, over_row=spec.over_row, classes=classes)
        _check_gradient(call, step, ratio, _name(function))
        _check_cuts(call, step, ratio, _name(function), wide=spec.needs_whole_step)


def try_functions(algorithm: AlgorithmSection) -> None:
    """Run the user's policy loss and correction on made-up steps in float32, as an engine does.

    In one of the steps all ratios are 1, as in the first update of an on-policy run.

    Raises:
        ConfigError: one raised an exception, or returned a wrong shape, no gradient, no choice of tokens, or a loss,
            gradient or weight that is not finite; or the loss of a step depends on its cut into micro-batches.
    """
    functions = PolicyFunctions(algorithm)
    step = _step_of(functions, algorithm).in_float32()
    for example in (step, replace(step, logprobs=step.proximal, rollout=step.proximal)):
        try:
            _try_step(functions, algorithm, example)
        except ConfigError as error:
            msg = f"{error} (tried on a made-up step)"
            raise ConfigError(msg) from error
    if functions.has_own_loss:
        _try_cuts(functions, algorithm)


def _step_of(functions: PolicyFunctions, algorithm: AlgorithmSection) -> _Step:
    classes = algorithm.scores.classes if functions.spec.head == "scores" else 0
    return _made_up(0, algorithm.ratio, over_row=functions.spec.over_row, classes=classes)


def _try_cuts(functions: PolicyFunctions, algorithm: AlgorithmSection) -> None:
    """Refuse a policy loss that depends on the cut into micro-batches."""

    def call(inputs: PolicyInputs) -> Tensor:
        return functions.policy_loss(inputs).loss

    source = f"algorithm.surrogate = {algorithm.surrogate!r}"
    step = _step_of(functions, algorithm)
    try:
        _check_cuts(
            call, step, algorithm.ratio, source, wide=functions.spec.needs_whole_step, tolerance=TRIED_TOLERANCE
        )
    except AssertionError as error:
        msg = f"{error} (tried on a made-up step)"
        raise ConfigError(msg) from error


def _try_step(functions: PolicyFunctions, algorithm: AlgorithmSection, step: _Step) -> None:
    every, totals = list(range(len(step.samples))), Totals(step={} if functions.spec.needs_whole_step else None)
    leaf = step.logprobs.clone().requires_grad_()
    inputs = _inputs(step, every, algorithm.ratio, totals, leaf)
    if functions.has_own_correction:
        _try_weights(functions.weights, step, f"algorithm.correction.kind = {algorithm.correction.kind!r}")
    if not functions.has_own_loss:
        return
    if functions.spec.choose is not None:
        columns = (t[inputs.mask].detach().numpy() for t in (inputs.advantages, inputs.logprobs, inputs.ratio))
        functions.choose(*columns, seed=0)
    loss = functions.policy_loss(inputs).loss.masked_fill(~inputs.mask, 0.0).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    wrong = ~gradient.isfinite()
    if wrong.any():
        msg = (
            f"algorithm.surrogate = {algorithm.surrogate!r} returned a finite loss with a gradient of "
            f"{float(gradient[wrong][0])} for {int(wrong.sum())} of {int(step.mask.sum())} tokens; bound square roots, "
            "powers and divisions whose gradient is not finite, e.g. (x * x + 1e-12).sqrt()"
        )
        raise ConfigError(msg)


def _try_weights(weights: Callable[[Tensor, Tensor, Tensor], TokenWeights], step: _Step, source: str) -> None:
    """Refuse a correction that depends on other sequences of the micro-batch."""
    whole = weights(step.proximal, step.rollout, step.mask).weight
    for row, length in enumerate(step.mask.sum(-1).tolist()):
        cut = slice(row, row + 1), slice(max(1, length))
        alone = weights(step.proximal[cut], step.rollout[cut], step.mask[cut]).weight
        differences = (alone - whole[cut]).abs().masked_fill(~step.mask[cut], 0.0)
        if (difference := float(differences.max())) > TRIED_TOLERANCE * max(1.0, float(whole.abs().max())):
            msg = (
                f"{source}: the weights of a sequence differ by {difference:.3g} between micro-batches with and "
                "without other sequences; compute them from the tokens of the sequence alone"
            )
            raise ConfigError(msg)


def _check_gradient(call: Callable[[PolicyInputs], Tensor], step: _Step, level: RatioLevel, name: str) -> None:
    every = list(range(len(step.samples)))
    constants: list[Tensor] = []

    def value(logprobs: Tensor, *, is_first: bool) -> Tensor:
        with _constant_detach(constants, records=is_first):
            per_token = call(_inputs(step, every, level, Totals(), logprobs))
        return per_token.masked_fill(~step.mask, 0.0).sum()

    leaf = step.logprobs.clone().requires_grad_()
    loss = value(leaf, is_first=True)
    _require(
        loss.requires_grad,
        f"{name} returns a loss without gradient; compute it from inputs.logprobs or inputs.ratio",
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    largest = float(gradient.abs().max().clamp(min=1.0))
    for row, column in step.mask.nonzero().tolist():
        ends = []
        for change in (STEP, -STEP):
            moved = step.logprobs.clone()
            moved[row, column] += change
            ends.append(float(value(moved, is_first=False)))
        expected, actual = (ends[0] - ends[1]) / (2 * STEP), float(gradient[row, column])
        _require(
            abs(actual - expected) <= 1e-5 * largest,
            f"{name}: the gradient of token {column} of sequence {row} is {actual:.9g}, finite differences give "
            f"{expected:.9g}; detach what is a constant, and nothing else",
        )


def _check_cuts(
    call: Callable[[PolicyInputs], Tensor],
    step: _Step,
    level: RatioLevel,
    name: str,
    *,
    wide: bool,
    tolerance: float = TOLERANCE,
) -> None:
    sequences = len(step.samples)
    whole = _loss_and_gradient(call, step, level, [list(range(sequences))], wide=wide)
    for cut in ([[i] for i in range(sequences)], [list(range(sequences))[::2], list(range(sequences))[1::2]]):
        loss, gradient = _loss_and_gradient(call, step, level, cut, wide=wide)
        for what, one, other in (("loss", whole[0], loss), ("gradient", whole[1], gradient)):
            largest = float(one.abs().max().clamp(min=1.0))
            difference = float((one - other).abs().max())
            _require(
                difference <= tolerance * largest,
                f"{name}: the {what} of a step differs by {difference:.3g} between 1 and {len(cut)} micro-batches; a "
                "token may read others only through inputs.sample_sum, through inputs.row_sum with "
                "@LossSpec(over_row=True), and through inputs.step_sum with @LossSpec(whole_step=True)",
            )


def _loss_and_gradient(
    call: Callable[[PolicyInputs], Tensor], step: _Step, level: RatioLevel, cut: Sequence[list[int]], *, wide: bool
) -> tuple[Tensor, Tensor]:
    """Return the step's mean loss and its gradient, as an engine computes them."""
    facts = _facts(call, step, level, cut, wide=wide)
    leaf = step.logprobs.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for rows in cut:
        samples, of_rows = (_columns(sums, rows) for sums in (facts.sample_sums, facts.row_sums))
        by_row = {name: torch.tensor(sums, dtype=torch.float64) for name, sums in facts.by_row.items()}
        numbers = torch.tensor([facts.row_numbers[i] for i in rows]) if by_row else None
        step_sums = facts.sums if wide else None
        totals = Totals(samples=samples, step=step_sums, rows=of_rows, by_row=by_row, row_number=numbers)
        inputs = _inputs(step, rows, level, totals, leaf)
        loss = reduce_loss(call(inputs), inputs.mask, mode="token_mean", normaliser=float(step.mask.sum()))
        torch.autograd.backward(loss)
        total = total + loss.detach()
    return total, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


@torch.no_grad()
def _facts(
    call: Callable[[PolicyInputs], Tensor], step: _Step, level: RatioLevel, cut: Sequence[list[int]], *, wide: bool
) -> StepFacts:
    """Run the pass that collects the sums over samples and the step."""
    empty = step.logprobs[0, :0].numpy()
    records: dict[int, SequenceRecord] = {}
    for rows in cut:
        totals = Totals(step={} if wide else None)
        call(_inputs(step, rows, level, totals, step.logprobs))
        for i, row in enumerate(rows):
            sums = {name: float(values[i]) for name, values in totals.recorded.items()}
            records[row] = SequenceRecord(empty, empty, empty, empty, sums)
    return sum_records([records[row] for row in range(len(step.samples))], step.samples, step.rows)


def _columns(sums: Sequence[Mapping[str, float]], rows: Sequence[int]) -> dict[str, Tensor]:
    """Return the sums of the chosen sequences, by name, as `[rows] float64`."""
    if not sums:
        return {}
    return {n: torch.tensor([sums[row][n] for row in rows], dtype=torch.float64) for n in sums[rows[0]]}


def _inputs(step: _Step, rows: Sequence[int], level: RatioLevel, totals: Totals, logprobs: Tensor) -> PolicyInputs:
    """Build the inputs of a micro-batch, padded to its longest sequence."""
    chosen = list(rows)
    width = max(1, int(step.mask[chosen].sum(-1).max()))
    cut = [t[chosen, :width] for t in (logprobs, step.proximal, step.advantages, step.mask, step.rollout)]
    counts = step.counts()[chosen]
    if step.rows:
        totals.row = torch.tensor([step.rows[i] for i in chosen])
    selected = torch.arange(width).expand(len(chosen), width) % 3 == 0
    others: dict[str, Tensor] = {}
    if step.classes:
        spread = torch.linspace(1.0, -1.0, step.classes) if step.classes > 1 else torch.ones(1)
        others["scores"] = cut[0].unsqueeze(-1) * spread.to(cut[0].dtype)
        others["targets"] = (torch.arange(width) % 2).to(cut[0].dtype).expand(len(chosen), width)
    return PolicyInputs.of(
        *cut[:4], level=level, rollout=cut[4], sample_tokens=counts, selected=selected, totals=totals, **others
    )


def _made_up(seed: int, level: RatioLevel, *, over_row: bool, classes: int = 0) -> _Step:
    random = torch.Generator().manual_seed(seed)
    lengths, samples = torch.tensor([9, 1, 4, 0, 6, 2]), (0, 1, 2, 3, 4, 4)
    shape = len(lengths), int(lengths.max())
    draw = torch.randn(3, *shape, generator=random, dtype=torch.float64)
    proximal = -draw[0].abs() - 0.1
    # The log of a product of ratios grows with the length of the sample.
    spread = 0.1 if level == "sequence_product" else 0.5
    logprobs = proximal + spread * draw[1]
    if level == "token":
        logprobs[0, :3] = proximal[0, :3] + torch.tensor([0.0, 4.0, -4.0], dtype=torch.float64)
    advantages = draw[2].clone()
    advantages[1:, :] = advantages[1:, :1]
    advantages[2] = 0.0
    mask = torch.arange(shape[1]) < lengths[:, None]
    of_rows = tuple(sample // 2 for sample in samples) if over_row else ()
    return _Step(logprobs, proximal, proximal + 0.05 * draw[2], advantages, mask, samples, of_rows, classes)


@contextmanager
def _constant_detach(constants: list[Tensor], *, records: bool) -> Iterator[None]:
    """Make later calls of `detach` return the first call's tensors, as constants."""
    detach, replayed = Tensor.detach, iter(constants)

    def constant(tensor: Tensor) -> Tensor:
        if not records:
            return next(replayed)
        constants.append(detach(tensor).clone())
        return constants[-1]

    with patch.object(Tensor, "detach", constant):
        yield


def _require(holds: bool, message: str) -> None:  # noqa: FBT001 a condition
    if not holds:
        raise AssertionError(message)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))
