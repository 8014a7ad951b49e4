"""Samples of several requests that are generated in lockstep, one token of each per step.

A batch takes in another one whose prompts have been prefilled: samples are aligned at their newest token, with padding
on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.engines.protocols.inference import Generation, GenerationRequest
from relax_actors.engines.protocols.stop_strings import START
from relax_actors.engines.transformers.batch_grammars import BatchGrammars, Begin
from relax_actors.engines.transformers.expert_recorder import ExpertRecorder
from relax_actors.engines.transformers.random_choice import choose, uniforms_of
from relax_actors.messages import FinishReason

_PER_SAMPLE = {
    "_temperature": 0,
    "_top_p": 0,
    "_greedy": 0,
    "_min_tokens": 0,
    "_max_tokens": 0,
    "_stops": -1,
    "_uniforms": 0,
    "_tokens": 0,
    "_logprobs": 0,
    "_entropies": 0,
    "_versions": 0,
    "_lengths": 0,
    "_stopped": 0,
}
"""Arrays with a row for each sample of a batch, and what rows are padded with."""
CPU_CHUNK, GPU_CHUNK = 1 << 20, 1 << 24
"""Logits from which tokens are drawn at once: the copies made of them need about 30 bytes each."""


class LockstepBatch:
    """Samples of several requests; ended samples leave once they are half of the batch.

    `prompts` and `prompt_mask` are `[requests, longest] int64`, padded on the left. `mask` `[batch, tokens]` and
    `positions` `[batch]` are those of the next forward pass. `alive` `[batch]` has the numbers of the samples.

    Args:
        requests: all with the same number of samples.
        pad: token id of the padding.
        device: torch device.
        numbers: numbers of the requests in the order of arrival.
        begin: compiles grammars.
        entropies: whether to compute the entropy of each token.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        pad: int,
        device: torch.device,
        numbers: list[int],
        begin: Begin,
        *,
        entropies: bool = False,
    ) -> None:
        self.requests = list(requests)
        self.numbers = numbers
        self._pad = pad
        self.prompt_mask, self.prompts = padded([r.tokens for r in requests], pad, device)
        counts = [r.samples for r in requests]
        self.repeats = counts[0]
        if len(set(counts)) != 1:  # the cache repeats all prompts by the same number
            msg = f"requests with {sorted(set(counts))} samples cannot share a batch; pass requests of equal group size"
            raise ValueError(msg)
        self.repeats_tensor = repeats = torch.tensor(counts, device=device)

        def per_sample(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).repeat_interleave(repeats, dim=0)

        self._temperature = per_sample([r.temperature for r in requests], torch.float32)[:, None]
        self._top_p = per_sample([r.top_p for r in requests], torch.float32)[:, None]
        self._greedy = torch.tensor(
            [r.is_greedy(sample) for r in requests for sample in range(r.samples)], device=device
        )
        self._min_tokens = per_sample([r.min_tokens for r in requests], torch.long)
        self._has_min_tokens = any(r.min_tokens for r in requests)
        self._max_tokens = per_sample([r.max_tokens for r in requests], torch.long)
        width = max(r.max_tokens for r in requests)
        self._uniforms = torch.from_numpy(np.concatenate([uniforms_of(r, width) for r in requests])).to(device)
        self.mask = self.prompt_mask.repeat_interleave(repeats, dim=0)
        self.positions = self.mask.sum(-1) - 1
        most = max(1, *(len(r.stop_ids) for r in requests))
        # `[samples, most]`, -1 where a request has fewer stop tokens.
        stops = [[*sorted(r.stop_ids), *[-1] * (most - len(r.stop_ids))] for r in requests]
        self._stops = per_sample(stops, torch.long)
        total = sum(counts)
        # Stop strings of each sample, and the state of its tokens so far.
        self._stop_strings = [r.stop_strings for r in requests for _ in range(r.samples)]
        self._has_stop_strings = any(self._stop_strings)
        self._states = [START] * total
        self._grammars = BatchGrammars(requests, begin)
        # First sample of each request, and the total.
        self._starts = np.cumsum([0, *counts])
        # Requests that have running samples, and the number of running samples, at the last call of `ended`.
        self._unfinished, self._running_before = set(range(len(requests))), total
        self.alive = torch.arange(total, device=device)
        self._running = torch.ones(total, dtype=torch.bool, device=device)
        self._tokens = torch.zeros((total, width), dtype=torch.int32, device=device)
        self._logprobs = torch.zeros((total, width), dtype=torch.float32, device=device)
        self._has_entropies = entropies
        self._entropies = torch.zeros((total, width if entropies else 0), dtype=torch.float32, device=device)
        self._versions = torch.zeros((total, width), dtype=torch.int32, device=device)
        self._lengths = torch.zeros(total, dtype=torch.long, device=device)
        self._stopped = torch.zeros(total, dtype=torch.bool, device=device)

    def sample(self, logits: Tensor, version: int) -> Tensor:
        """Sample the next token of every sample in the batch.

        Args:
            logits: `[batch, vocab]`.
            version: of the weights that computed them.

        Returns:
            Token ids, `[batch]`.
        """
        alive, running = self.alive, self._running
        rows_at_once = max(1, (CPU_CHUNK if logits.is_cpu else GPU_CHUNK) // logits.shape[1])
        starts = range(0, len(alive), rows_at_once)
        drawn = [self._draw(logits[i : i + rows_at_once], alive[i : i + rows_at_once]) for i in starts]
        tokens, logprobs, entropies = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        rows = alive[running]
        places = self._lengths[rows]
        self._tokens[rows, places] = tokens[running].int()
        self._logprobs[rows, places] = logprobs[running]
        if self._has_entropies:
            self._entropies[rows, places] = entropies[running]
        self._versions[rows, places] = version
        self._lengths[rows] += 1
        stopped = (tokens[:, None] == self._stops[alive]).any(-1)
        if self._has_stop_strings:
            stopped |= self._end_stop_strings(tokens)
        stopped &= running
        self._stopped[alive[stopped]] = True
        self._running = running & ~stopped & (self._max_tokens[alive] > self._lengths[alive])
        if self._grammars:
            self._grammars.advance(rows, tokens[running])
            self._running &= ~self._grammars.broken(alive)
        self._inform()
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        self.positions = self.positions + 1
        return tokens

    def _inform(self) -> None:
        """Show new tokens to the watches of running requests, and end the samples that nobody waits for."""
        for i in self._unfinished:
            if (watch := self.requests[i].watch) is None:
                continue
            sample = int(self._starts[i])
            if watch.wants_tokens:
                end = int(self._lengths[sample])
                tokens, logprobs = (a[sample, end - 1 : end].cpu().numpy() for a in (self._tokens, self._logprobs))
                watch.on_tokens(end - 1, tokens.copy(), logprobs.copy())
            if watch.is_cancelled:
                self._running &= self.alive != sample

    def _draw(self, logits: Tensor, samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a token of some samples.

        Args:
            logits: `[samples, vocab]`.
            samples: their numbers, `[samples]`.

        Returns:
            Token ids, their log-probs, and entropies, `[samples]`; no entropies unless they are recorded.
        """
        logprobs = (logits.float() / self._temperature[samples]).log_softmax(-1)
        allowed = self._allowed(logprobs, samples)
        if self._grammars:
            allowed = self._grammars.mask(allowed, logprobs, samples)
        # Of a sample that has ended, any number: its token is ignored.
        places = self._lengths[samples].clamp(max=self._uniforms.shape[1] - 1)
        tokens = choose(allowed, self._top_p[samples], self._uniforms[samples, places])
        tokens = torch.where(self._greedy[samples], allowed.argmax(-1), tokens)
        entropies = torch.special.entr(logprobs.exp()).sum(-1) if self._has_entropies else logprobs[:0, 0]
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0], entropies

    def _end_stop_strings(self, tokens: Tensor) -> Tensor:
        """Return which samples in the batch `[batch] bool` end because a stop string ends in their newest token."""
        alive = self.alive.tolist()
        ended = [False] * len(alive)
        for i, (number, token) in enumerate(zip(alive, tokens.tolist(), strict=True)):
            if (strings := self._stop_strings[number]) is not None:
                self._states[number], ended[i] = strings.advance(self._states[number], token)
        return torch.tensor(ended, device=tokens.device) & (self._min_tokens[self.alive] < self._lengths[self.alive])

    def _allowed(self, logprobs: Tensor, samples: Tensor) -> Tensor:
        """Mask the stop tokens of samples below their minimum length."""
        if not self._has_min_tokens:
            return logprobs
        early = (self._min_tokens[samples] > self._lengths[samples])[:, None]
        vocabulary, own = logprobs.shape[1], self._stops[samples]
        # One column more, for the requests with fewer stop tokens.
        stops = torch.zeros(len(samples), vocabulary + 1, dtype=torch.bool, device=logprobs.device)
        stops.scatter_(1, torch.where(own < 0, vocabulary, own), torch.ones_like(own, dtype=torch.bool))
        return logprobs.masked_fill(early & stops[:, :vocabulary], float("-inf"))

    @property
    def max_length(self) -> int:
        """Largest number of tokens of prompt and completion, padding included."""
        return self.prompts.shape[1] + self._tokens.shape[1]

    @property
    def finished(self) -> bool:
        """Whether no sample is running."""
        return not bool(self._running.any())

    def shrink(self, *, all_ended: bool = False) -> Tensor | None:
        """Remove ended samples once they are half of the batch, or at once; return the positions kept.

        None if the batch stays as it is.
        """
        count = int(self._running.sum())
        if count == len(self._running) or (count * 2 > len(self._running) and not all_ended):
            return None
        keep = self._running.nonzero()[:, 0]
        self.alive, self._running = self.alive[keep], self._running[keep]
        self.mask, self.positions = self.mask[keep], self.positions[keep]
        return keep

    @property
    def owners(self) -> NDArray[Any]:
        """Request of each sample in the batch, `[batch] int64`."""
        owners: NDArray[Any] = np.searchsorted(self._starts, self.alive.cpu().numpy(), "right") - 1
        return owners

    def all_tokens(self) -> Tensor:
        """Return the prompts and completions of the samples in the batch, and lay `mask` out in the same way."""
        alive, generated = self.alive.cpu().numpy(), self._tokens.cpu().numpy()
        lengths = self._lengths.cpu().numpy()
        sequences = [
            np.concatenate([self.requests[owner].tokens, generated[sample, : lengths[sample]]])
            for owner, sample in zip(self.owners, alive, strict=True)
        ]
        self.mask, tokens = padded(sequences, self._pad, self.mask.device)
        self.positions = self.mask.sum(-1) - 1
        return tokens

    def place_and_tokens(self, i: int) -> tuple[int, NDArray[Any]]:
        """Place in the batch, and prompt and completion `[len]`, of request `i` of one sample, which has just ended."""
        sample = int(self._starts[i])
        own = self._tokens[sample, : int(self._lengths[sample])].cpu().numpy()
        place = int((self.alive == sample).nonzero()[0, 0])
        return place, np.concatenate([self.requests[i].tokens, own])

    def absorb(self, other: LockstepBatch) -> int:
        """Take in the samples of a batch whose prompts have been prefilled, behind the own ones.

        Call it when all samples in the batch run. Requests that have ended are forgotten.

        Returns:
            How many of the columns on the left of `mask` hold nothing but padding now; they are removed.
        """
        self._forget_ended()
        total = len(self._lengths)
        for name, fill in _PER_SAMPLE.items():
            setattr(self, name, _stacked(getattr(self, name), getattr(other, name), fill))
        self.mask = _stacked(self.mask, other.mask, 0, left=True)
        self.positions = torch.cat([self.positions, other.positions])
        self.alive = torch.cat([self.alive, other.alive + total])
        self._running = torch.cat([self._running, other._running])
        self._unfinished |= {i + len(self.requests) for i in other._unfinished}
        self._starts = np.concatenate([self._starts, other._starts[1:] + total])
        self.requests += other.requests
        self.numbers += other.numbers
        self._stop_strings += other._stop_strings
        self._states += other._states
        self._grammars.absorb(other._grammars)
        self._has_stop_strings |= other._has_stop_strings
        self._has_min_tokens |= other._has_min_tokens
        self._running_before = len(self._running)
        unused = int(self.mask.any(0).int().argmax())
        self.mask = self.mask[:, unused:]
        return unused

    def _forget_ended(self) -> None:
        kept = sorted(self._unfinished)
        counts = [self.requests[i].samples for i in kept]
        samples = np.concatenate([np.arange(self._starts[i], self._starts[i + 1]) for i in kept])
        index = torch.from_numpy(samples).to(self.alive.device)
        for name in _PER_SAMPLE:
            setattr(self, name, getattr(self, name)[index])
        self.alive = torch.searchsorted(index, self.alive)
        self._stop_strings = [self._stop_strings[i] for i in samples]
        self._states = [self._states[i] for i in samples]
        self._grammars.keep(samples.tolist())
        self.requests, self.numbers = [self.requests[i] for i in kept], [self.numbers[i] for i in kept]
        self._starts, self._unfinished = np.cumsum([0, *counts]), set(range(len(kept)))

    def ended(self) -> list[int]:
        """Return the requests whose last sample has ended since the previous call."""
        before, self._running_before = self._running_before, int(self._running.sum())
        if self._running_before == before:
            return []
        running = self.alive[self._running].cpu().numpy()
        unfinished = set((np.searchsorted(self._starts, running, "right") - 1).tolist())
        ended, self._unfinished = sorted(self._unfinished - unfinished), unfinished
        return ended

    def result(self, i: int, experts: ExpertRecorder | None) -> list[Generation]:
        """Return the samples of request `i`, which has ended."""
        part = slice(self._starts[i], self._starts[i + 1])
        lengths, stopped = self._lengths[part].tolist(), self._stopped[part].tolist()
        routed = experts.experts_of(i, lengths) if experts is not None else [None] * len(lengths)
        tokens, logprobs, versions, entropies = (
            array[part].cpu().numpy() for array in (self._tokens, self._logprobs, self._versions, self._entropies)
        )
        group = []
        for k, n in enumerate(lengths):
            reason = FinishReason.STOP if stopped[k] else FinishReason.LENGTH
            if self._grammars.is_broken(int(self._starts[i]) + k):
                reason = FinishReason.ERROR
            columns = [array[k, :n].copy() for array in (tokens, logprobs, versions)]
            own = entropies[k, :n].copy() if self._has_entropies else None
            group.append(Generation(columns[0], columns[1], columns[2], reason, routed[k], own))
        return group


def padded(sequences: Sequence[NDArray[Any]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mask and the ids of sequences that are padded on the left, both `[sequences, longest] int64`."""
    longest = max(map(len, sequences))
    tokens = np.full((len(sequences), longest), pad, np.int64)
    mask = np.zeros((len(sequences), longest), np.int64)
    for i, sequence in enumerate(sequences):
        tokens[i, longest - len(sequence) :] = sequence
        mask[i, longest - len(sequence) :] = 1
    return torch.from_numpy(mask).to(device), torch.from_numpy(tokens).to(device)


def _stacked(first: Tensor, second: Tensor, fill: int, *, left: bool = False) -> Tensor:
    """Stack rows of two batches; the shorter rows are padded on the right, or on the left."""
    if first.dim() > 1 and (missing := first.shape[1] - second.shape[1]):
        pad = (abs(missing), 0) if left else (0, abs(missing))
        first = torch.nn.functional.pad(first, pad, value=fill) if missing < 0 else first
        second = torch.nn.functional.pad(second, pad, value=fill) if missing > 0 else second
    return torch.cat([first, second])
