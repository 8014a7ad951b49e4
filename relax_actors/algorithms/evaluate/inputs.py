"""Inputs and outputs of a case: nested lists of numbers as padded float64 tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MAX_CELLS = 10_000_000
"""Largest number of samples times the tokens of the longest one: 80 MB in a padded tensor."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of a case.

    Attributes:
        outputs: by name: a number, a tensor `[samples]`, or a tensor `[samples, width]`, which is cut to ragged lists.
        gradients: of the output `loss`, by input; tensors as in `outputs`.
    """

    outputs: Mapping[str, float | Tensor | list[Any]]
    gradients: Mapping[str, Tensor] = field(default_factory=dict)


class Inputs:
    """Inputs of a case: numbers by name, as read from JSON."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.read: dict[str, None] = {}
        tokens = {name: value for name, value in raw.items() if _is_ragged(value)}
        self._lengths: list[int] | None = None
        if tokens:
            first = next(iter(tokens))
            self._lengths = bounded([len(row) for row in tokens[first]])

    @property
    def has_tokens(self) -> bool:
        """Whether an input is given for each token."""
        return self._lengths is not None

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each sample; raises ValueError if no input is given for each token."""
        if self._lengths is None:
            msg = "no input has one list of numbers for each sample; give at least one input for each token"
            raise ValueError(msg)
        return self._lengths

    def given_lengths(self, samples: int) -> list[int]:
        """Number of tokens of each sample: of inputs by token, or `lengths`, or 1.

        Raises:
            ValueError: `lengths` is not one number of tokens for each sample, or the samples are too long.
        """
        if self._lengths is not None:
            return self._lengths
        lengths = self.optional("lengths", [1] * samples)
        if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
            msg = "input 'lengths' must be a list with the number of tokens of each sample"
            raise ValueError(msg)
        return bounded(lengths)

    def sample(self, name: str) -> Tensor:
        """Return an input of samples, `[samples] float64`; raises ValueError."""
        return _numbers(self.required(name), name)

    def token(self, name: str, *, gradient: bool = False) -> Tensor:
        """Return an input of tokens, `[samples, width] float64`, padded; raises ValueError."""
        rows = self.required(name)
        if not _is_ragged(rows) or [len(row) for row in rows] != self.lengths:
            msg = f"input {name!r} must have one list of numbers for each sample, of lengths {self.lengths}"
            raise ValueError(msg)
        padded = torch.zeros(len(rows), max([1, *self.lengths]), dtype=torch.float64)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = _numbers(row, f"{name}[{i}]")
        return padded.requires_grad_(gradient)

    def sample_or_token(self, name: str) -> Tensor:
        """Return an input with one number for each sample or each token, `[samples, width] float64`."""
        if _is_ragged(self.required(name)):
            return self.token(name)
        return self.sample(name).unsqueeze(-1).expand(-1, max([1, *self.lengths]))

    def optional_token(self, name: str) -> Tensor | None:
        """Return an input with one number for each token; None if it is missing."""
        return None if self.optional(name) is None else self.token(name)

    def optional(self, name: str, default: Any = None) -> Any:
        """Return an input as it was given, or the default."""
        self.read[name] = None
        return self.raw.get(name, default)

    def vocabulary(self, name: str, *, gradient: bool = False) -> Tensor:
        """Return an input of vocabularies, `[samples, width, size] float64`, padded with 0."""
        rows = self.required(name)
        lengths = self.lengths
        if [len(row) for row in rows] != lengths:
            msg = f"input {name!r} must have one list for each token of the samples, of lengths {lengths}"
            raise ValueError(msg)
        size = len(next((token for row in rows for token in row), [0]))
        padded = torch.zeros(len(rows), max([1, *lengths]), size, dtype=torch.float64)
        for i, row in enumerate(rows):
            for t, token in enumerate(row):
                numbers = _numbers(token, f"{name}[{i}][{t}]")
                if len(numbers) != size:
                    msg = f"input {name}[{i}][{t}] has {len(numbers)} numbers, the first token has {size}; give as many"
                    raise ValueError(msg)
                padded[i, t] = numbers
        return padded.requires_grad_(gradient)

    def groups(self, samples: int) -> list[list[int]]:
        """Return the samples of each group, or all as one; raises ValueError."""
        ids = self.optional("groups") or [0] * samples
        if len(ids) != samples:
            msg = f"groups has {len(ids)} ids for {samples} samples; give one for each"
            raise ValueError(msg)
        groups: dict[Any, list[int]] = {}
        for i, group in enumerate(ids):
            groups.setdefault(group, []).append(i)
        return list(groups.values())

    @property
    def mask(self) -> Tensor:
        """Tokens that count, `[samples, width] bool`: input `mask`, or all tokens."""
        present = torch.arange(max([1, *self.lengths])) < torch.tensor(self.lengths)[:, None]
        given = self.optional_token("mask")
        return present if given is None else present & (given != 0)

    def required(self, name: str) -> Any:
        """Return an input as it was given; raises ValueError if it is missing."""
        self.read[name] = None
        if name not in self.raw:
            msg = f"input {name!r} is missing; given: {', '.join(self.raw) or 'none'}"
            raise ValueError(msg)
        return self.raw[name]


def bounded(lengths: list[int]) -> list[int]:
    """Return the lengths of samples; raises ValueError if padding would be too large."""
    longest = max(lengths, default=0)
    if len(lengths) * longest > MAX_CELLS:
        msg = (
            f"{len(lengths)} samples, padded to the longest of {longest} tokens, have {len(lengths) * longest} cells; "
            f"a case has at most {MAX_CELLS}: shorten the samples, or divide them into several cases"
        )
        raise ValueError(msg)
    return lengths


def as_json(value: float | Tensor | list[Any], lengths: Sequence[int]) -> Any:
    """Return an output as plain data; ragged lists by sample, nan and inf as text.

    `lengths` are the numbers of tokens of the samples; empty if there are no tokens.
    """
    if isinstance(value, Tensor):
        rows = value.detach().double() if value.is_floating_point() else value.detach().long()
        if rows.ndim >= 2 and len(lengths) == len(rows):  # noqa: PLR2004 samples and tokens
            return [_plain(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)]
        return _plain(rows.tolist())
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _is_ragged(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, list) for row in value)


def _numbers(values: Any, name: str) -> Tensor:
    if not isinstance(values, list) or not all(isinstance(v, int | float) for v in values):
        msg = f"input {name!r} must be a list of numbers"
        raise ValueError(msg)
    return torch.tensor(values, dtype=torch.float64)
