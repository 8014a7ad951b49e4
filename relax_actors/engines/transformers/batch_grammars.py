"""Grammars of the samples of a batch: which tokens a sample may go on with, and which samples cannot go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from relax_actors.data.grammar import GrammarError, GrammarState
from relax_actors.engines.protocols.inference import GenerationRequest
from relax_actors.errors import ConfigError

Begin = Callable[[str], GrammarState]
"""Returns the state before the first token of an answer; see `Grammars.begin`."""


class BatchGrammars:
    """States of the samples of a batch, by their numbers; false if no sample has a grammar."""

    def __init__(self, requests: Sequence[GenerationRequest], begin: Begin) -> None:
        self._states: list[GrammarState | None] = []
        self._broken: set[int] = set()
        self._has_any = any(request.grammar for request in requests)
        for grammar in (request.grammar for request in requests for _ in range(request.samples)):
            state = None
            if grammar:
                try:
                    state = begin(grammar)
                except (GrammarError, ConfigError):
                    self._broken.add(len(self._states))
            self._states.append(state)

    def __bool__(self) -> bool:
        return self._has_any

    def mask(self, given: Tensor, logprobs: Tensor, samples: Tensor) -> Tensor:
        """Mask the tokens that grammars forbid, and scale the others to a distribution.

        The grammar alone decides the end of its samples, not their smallest number of tokens. A sample that cannot go
        on is broken from now on.

        Args:
            given: log-probs to sample from, `[samples, vocab]`; rows without a grammar stay.
            logprobs: those of the model, `[samples, vocab]`.
            samples: numbers of the samples, `[samples]`.
        """
        masked = given.clone()
        for row, number in enumerate(samples.tolist()):
            state = self._states[number]
            if state is None or state.is_over or number in self._broken:
                continue
            try:
                allowed = torch.from_numpy(state.allowed())[: given.shape[1]].to(given.device)
            except GrammarError:
                self._broken.add(number)
                continue
            own = torch.full_like(masked[row], float("-inf"))
            own[: len(allowed)] = logprobs[row, : len(allowed)].masked_fill(~allowed, float("-inf"))
            if not bool(own.isfinite().any()):
                self._broken.add(number)
                continue
            # The mass of what is allowed may be too small for a probability.
            masked[row] = own.log_softmax(-1)
        return masked

    def advance(self, samples: Tensor, tokens: Tensor) -> None:
        """Add the newest tokens of some samples, `[samples]`."""
        for number, token in zip(samples.tolist(), tokens.tolist(), strict=True):
            state = self._states[number]
            if state is None or number in self._broken:
                continue
            try:
                state.advance(token)
            except GrammarError:
                self._broken.add(number)

    def broken(self, samples: Tensor) -> Tensor:
        """Return which of some samples cannot go on, `[samples] bool`."""
        return torch.tensor([number in self._broken for number in samples.tolist()], device=samples.device)

    def is_broken(self, number: int) -> bool:
        """Whether a sample cannot go on."""
        return number in self._broken

    def absorb(self, other: BatchGrammars) -> None:
        """Take in the samples of another batch, behind the own ones."""
        self._broken |= {number + len(self._states) for number in other._broken}
        self._states += other._states
        self._has_any |= other._has_any

    def keep(self, samples: Iterable[int]) -> None:
        """Keep some samples alone, which get new numbers in this order."""
        kept = list(samples)
        self._broken = {place for place, number in enumerate(kept) if number in self._broken}
        self._states = [self._states[number] for number in kept]
