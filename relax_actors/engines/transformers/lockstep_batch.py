"""Samples of several requests that are generated in lockstep, one token of each per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.engines.protocols.inference import Generation, GenerationRequest
from relax_actors.engines.protocols.stop_strings import START
from relax_actors.engines.transformers.expert_recorder import ExpertRecorder
from relax_actors.messages import FinishReason

CPU_CHUNK, GPU_CHUNK = 1 << 20, 1 << 24
"""Logits from which tokens are drawn at once: the copies made of them need about 30 bytes each."""


class LockstepBatch:
    """Samples of several requests; ended samples leave once they are half of the batch.

    `prompts` and `prompt_mask` are `[requests, longest] int64`, padded on the left. `mask` `[batch, tokens]` and
    `positions` `[batch]` are those of the next forward pass.

    Args:
        requests: all with the same number of samples.
        pad: token id of the padding.
        device: torch device.
    """

    def __init__(self, requests: Sequence[GenerationRequest], pad: int, device: torch.device) -> None:
        self._requests = requests
        longest = max(len(r.tokens) for r in requests)
        prompts = np.full((len(requests), longest), pad, np.int64)
        mask = np.zeros((len(requests), longest), np.int64)
        for i, request in enumerate(requests):
            prompts[i, longest - len(request.tokens) :] = request.tokens
            mask[i, longest - len(request.tokens) :] = 1
        self.prompts = torch.from_numpy(prompts).to(device)
        self.prompt_mask = torch.from_numpy(mask).to(device)
        counts = [r.samples for r in requests]
        # The cache repeats all prompts by the same number.
        self.repeats = _equal_count(counts)
        self.repeats_tensor = torch.tensor(counts, device=device)

        def per_sample(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).repeat_interleave(self.repeats_tensor)

        self._temperature = per_sample([r.temperature for r in requests], torch.float32)[:, None]
        self._top_p = per_sample([r.top_p for r in requests], torch.float32)[:, None]
        greedy = [r.is_greedy(sample) for r in requests for sample in range(r.samples)]
        self._greedy = torch.tensor(greedy, device=device)
        self._min_tokens = per_sample([r.min_tokens for r in requests], torch.long)
        self._has_min_tokens = any(r.min_tokens for r in requests)
        self._max_tokens = per_sample([r.max_tokens for r in requests], torch.long)
        width = max(r.max_tokens for r in requests)
        self._uniforms = torch.from_numpy(np.concatenate([_uniforms(r, width) for r in requests])).to(device)
        self.mask = self.prompt_mask.repeat_interleave(self.repeats_tensor, dim=0)
        self.positions = self.mask.sum(-1) - 1
        stops = sorted({s for r in requests for s in r.stop_ids})
        self._stops = torch.tensor(stops, dtype=torch.long, device=device)
        total = sum(counts)
        # Stop strings of each sample, and the state of its tokens so far.
        self._stop_strings = [r.stop_strings for r in requests for _ in range(r.samples)]
        self._has_stop_strings = any(self._stop_strings)
        self._states = [START] * total
        # First sample of each request, and the total.
        self._starts = np.cumsum([0, *counts])
        # Requests that have running samples, and the number of running samples, at the last call of `ended`.
        self._unfinished, self._running_before = set(range(len(requests))), total
        self._alive = torch.arange(total, device=device)
        self._running = torch.ones(total, dtype=torch.bool, device=device)
        self._tokens = torch.zeros((total, width), dtype=torch.int32, device=device)
        self._logprobs = torch.zeros((total, width), dtype=torch.float32, device=device)
        self._versions = torch.zeros((total, width), dtype=torch.int32, device=device)
        self._lengths = torch.zeros(total, dtype=torch.long, device=device)
        self._stopped = torch.zeros(total, dtype=torch.bool, device=device)
        self._step = 0

    def sample(self, logits: Tensor, version: int) -> Tensor:
        """Sample the next token of every sample in the batch.

        Args:
            logits: `[batch, vocab]`.
            version: of the weights that computed them.

        Returns:
            Token ids, `[batch]`.
        """
        alive, running = self._alive, self._running
        rows_at_once = max(1, (CPU_CHUNK if logits.is_cpu else GPU_CHUNK) // logits.shape[1])
        starts = range(0, len(alive), rows_at_once)
        drawn = [self._draw(logits[i : i + rows_at_once], alive[i : i + rows_at_once]) for i in starts]
        tokens, logprobs = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        rows = alive[running]
        self._tokens[rows, self._step] = tokens[running].int()
        self._logprobs[rows, self._step] = logprobs[running]
        self._versions[rows, self._step] = version
        self._lengths[rows] += 1
        stopped = torch.isin(tokens, self._stops)
        if self._has_stop_strings:
            stopped |= self._end_stop_strings(tokens)
        stopped &= running
        self._stopped[alive[stopped]] = True
        self._step += 1
        self._running = running & ~stopped & (self._max_tokens[alive] > self._step)
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        self.positions = self.positions + 1
        return tokens

    def _draw(self, logits: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a token of some samples.

        Args:
            logits: `[samples, vocab]`.
            samples: their numbers, `[samples]`.

        Returns:
            Token ids and their log-probs, `[samples]`.
        """
        logprobs = (logits.float() / self._temperature[samples]).log_softmax(-1)
        allowed = self._allowed(logprobs, samples)
        tokens = _choose(allowed, self._top_p[samples], self._uniforms[samples, self._step])
        tokens = torch.where(self._greedy[samples], allowed.argmax(-1), tokens)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]

    def _end_stop_strings(self, tokens: Tensor) -> Tensor:
        """Return which samples in the batch `[batch] bool` end because a stop string ends in their newest token."""
        alive = self._alive.tolist()
        found = [False] * len(alive)
        for i, (number, token) in enumerate(zip(alive, tokens.tolist(), strict=True)):
            if (strings := self._stop_strings[number]) is not None:
                self._states[number], found[i] = strings.advance(self._states[number], token)
        return torch.tensor(found, device=tokens.device) & (self._min_tokens[self._alive] <= self._step)

    def _allowed(self, logprobs: Tensor, samples: Tensor) -> Tensor:
        """Mask the stop tokens of samples below their minimum length."""
        if not self._has_min_tokens:
            return logprobs
        early = (self._min_tokens[samples] > self._step)[:, None]
        stops = torch.zeros(logprobs.shape[1], dtype=torch.bool, device=logprobs.device)
        stops[self._stops] = True
        return logprobs.masked_fill(early & stops, float("-inf"))

    @property
    def max_length(self) -> int:
        """Largest number of tokens of prompt and completion, padding included."""
        return self.prompts.shape[1] + self._tokens.shape[1]

    @property
    def alive(self) -> Tensor:
        """Numbers of the samples in the batch, `[batch]`."""
        return self._alive

    @property
    def finished(self) -> bool:
        """Whether no sample is running."""
        return not bool(self._running.any())

    def shrink(self) -> Tensor | None:
        """Remove ended samples once they are half of the batch; return the positions kept.

        None if the batch stays as it is.
        """
        count = int(self._running.sum())
        if count * 2 > len(self._running):
            return None
        keep = self._running.nonzero()[:, 0]
        self._alive, self._running = self._alive[keep], self._running[keep]
        self.mask, self.positions = self.mask[keep], self.positions[keep]
        return keep

    @property
    def owners(self) -> NDArray[Any]:
        """Request of each sample in the batch, `[batch] int64`."""
        found: NDArray[Any] = np.searchsorted(self._starts, self._alive.cpu().numpy(), "right") - 1
        return found

    def all_tokens(self) -> Tensor:
        """Return the prompts and completions of the samples in the batch, laid out as `mask`."""
        prompts = self.prompts.repeat_interleave(self.repeats_tensor, dim=0)[self._alive]
        return torch.cat([prompts, self._tokens[self._alive, : self._step].long()], dim=1)

    def ended(self) -> list[int]:
        """Return the requests whose last sample has ended since the previous call."""
        before, self._running_before = self._running_before, int(self._running.sum())
        if self._running_before == before:
            return []
        running = self._alive[self._running].cpu().numpy()
        unfinished = set((np.searchsorted(self._starts, running, "right") - 1).tolist())
        ended, self._unfinished = sorted(self._unfinished - unfinished), unfinished
        return ended

    def result(self, i: int, experts: ExpertRecorder | None) -> list[Generation]:
        """Return the samples of request `i`, which has ended."""
        part = slice(self._starts[i], self._starts[i + 1])
        lengths, stopped = self._lengths[part].tolist(), self._stopped[part].tolist()
        routed = experts.experts_of(i, lengths) if experts is not None else [None] * len(lengths)
        tokens, logprobs, versions = (
            array[part].cpu().numpy() for array in (self._tokens, self._logprobs, self._versions)
        )
        group = []
        for k, n in enumerate(lengths):
            reason = FinishReason.STOP if stopped[k] else FinishReason.LENGTH
            columns = [array[k, :n].copy() for array in (tokens, logprobs, versions)]
            group.append(Generation(columns[0], columns[1], columns[2], reason, routed[k]))
        return group


def _uniforms(request: GenerationRequest, width: int) -> NDArray[Any]:
    """Draw `[samples, width] float64` in [0, 1) from the seed alone; zeros from `max_tokens`."""
    generator = np.random.Generator(np.random.Philox(key=request.seed))
    drawn = generator.random((request.samples, request.max_tokens))
    return np.pad(drawn, ((0, 0), (0, width - request.max_tokens)))


def _choose(logprobs: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverting the cumulative distribution.

    Args:
        logprobs: `[batch, vocab]`.
        top_p: `[batch, 1]`.
        uniforms: `[batch] float64` in [0, 1).

    Returns:
        Token ids, `[batch]`.
    """
    probs = logprobs.double().exp()
    if bool((top_p < 1).any()):
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        # Smallest set that reaches top_p: keep a token if the more likely ones do not reach it yet.
        ordered = ordered * (ordered.cumsum(-1) - ordered < top_p)
        probs = torch.zeros_like(probs).scatter(1, order, ordered)
    cumulative = probs.cumsum(-1)
    index = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(-1)
    # A uniform close to 1 can step past the last token because of rounding.
    last = probs.shape[1] - 1 - (probs > 0).flip(-1).byte().argmax(-1)
    return torch.minimum(index, last)


def _equal_count(counts: list[int]) -> int:
    if len(set(counts)) != 1:
        msg = f"requests with {sorted(set(counts))} samples cannot share a batch; pass requests of equal group size"
        raise ValueError(msg)
    return counts[0]
