"""Generation in this process: a transformers model, a key-value cache, and a sampling loop of ours.

The loop is ours because a sample's random numbers must come from its row's seed alone, log-probs are wanted of every
token, and a prompt is read once for its whole group. On small models it also has less overhead a token than
`generate` (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from relax_actors.engines.protocols.inference import (
    Done,
    GeneratesAll,
    Generation,
    GenerationRequest,
    More,
    Refresh,
    nothing_more,
)
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.hosted_model import ServedModel
from relax_actors.engines.torch.model import context_length
from relax_actors.engines.transformers.recorded_experts import RecordedExperts
from relax_actors.messages import FinishReason


class TransformersEngine(ServedModel, GeneratesAll):
    """A model folder's architecture; weights come by version.

    Args:
        path: model folder.
        device: torch device.
        dtype: what it computes in.
        records_experts: whether generations tell which experts were chosen.

    Raises:
        ConfigError: they are to, and the model has no router that is known.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        records_experts: bool = False,
    ) -> None:
        super().__init__(path, device, dtype)
        self._routers = Routers(self._model) if records_experts else None
        pad = self._model.config.pad_token_id
        self._pad = 0 if pad is None else int(pad)

    @property
    def context_length(self) -> int:
        """Tokens that prompt and completion may have together."""
        return context_length(self._model)

    @torch.inference_mode()
    def stream(
        self,
        requests: Sequence[GenerationRequest],
        progress: Callable[[], None],
        refresh: Refresh | None = None,
        more: More = nothing_more,
    ) -> Iterator[Done]:
        """Generate all samples as one batch, which takes no more in; see the protocol."""
        del more
        version = self.require_weights()
        batch = _Batch(requests, self._pad, self._device)
        experts = RecordedExperts([r.samples for r in requests]) if self._routers is not None else None
        cache, logits, chosen = self._read(batch.prompts, batch.prompt_mask)
        cache.batch_repeat_interleave(batch.repeats)
        # Each prompt is read once for all of its samples.
        logits = logits.repeat_interleave(batch.repeats_tensor, dim=0)
        if experts is not None and chosen is not None:
            experts.prompts(chosen, [len(r.tokens) for r in requests])
        while True:
            progress()
            tokens = batch.take(logits, version)
            if ended := batch.ended():
                yield [(i, batch.result(i, experts)) for i in ended]
            if batch.finished:
                return
            if (keep := batch.shrink()) is not None:
                cache.batch_select_indices(keep)
                tokens = tokens[keep]
            if refresh is not None and refresh():
                version = self.require_weights()
                # Keys and values of other weights would make log-probs that no version has.
                cache, logits, chosen = self._read(batch.so_far(), batch.mask)
            else:
                logits, chosen = self._pass(tokens[:, None], batch.mask, batch.positions[:, None], cache)
            if experts is not None and chosen is not None:
                experts.step(chosen[:, -1], batch.alive)

    def _read(self, tokens: Tensor, mask: Tensor) -> tuple[DynamicCache, Tensor, Tensor | None]:
        """Keys and values of tokens padded on the left, and what `_pass` gives."""
        cache = DynamicCache(config=self._model.config)
        return cache, *self._pass(tokens, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)

    def _pass(
        self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache
    ) -> tuple[Tensor, Tensor | None]:
        """The logits after the last token, `[batch, vocab]`, and the experts chosen for each, if they are recorded.

        These are `[batch, tokens, layers, experts_of_token] int64`.
        """
        chosen: list[Tensor] = []
        with self._routers.recording(chosen) if self._routers is not None else nullcontext():
            out = self._model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                logits_to_keep=1,
            )
        experts = torch.stack(chosen, 1).view(*tokens.shape, len(chosen), -1) if chosen else None
        return out.logits[:, -1], experts


class _Batch:
    """The samples of some requests in lockstep; those that ended leave the batch when they are half of it."""

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
        # One number where all groups are equal: the cache repeats by a number only.
        self.repeats = counts[0] if len(set(counts)) == 1 else _refuse_mixed(counts)
        self.repeats_tensor = torch.tensor(counts, device=device)

        def each(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).repeat_interleave(self.repeats_tensor)

        self._temperature = each([r.temperature for r in requests], torch.float32)[:, None]
        self._top_p = each([r.top_p for r in requests], torch.float32)[:, None]
        self._greedy = each([r.greedy for r in requests], torch.bool)
        self._least = each([r.min_tokens for r in requests], torch.long)
        self._may_refuse = any(r.min_tokens for r in requests)
        self._limit = each([r.max_tokens for r in requests], torch.long)
        width = max(r.max_tokens for r in requests)
        self._uniforms = torch.from_numpy(np.concatenate([_uniforms(r, width) for r in requests])).to(device)
        self.mask = self.prompt_mask.repeat_interleave(self.repeats_tensor, dim=0)
        self.positions = self.mask.sum(-1) - 1
        stops = sorted({s for r in requests for s in r.stop_ids})
        self._stops = torch.tensor(stops, dtype=torch.long, device=device)
        total = sum(counts)
        # Where the samples of each request begin, and the end of all; who still has some that go on, and how many.
        self._begins = np.cumsum([0, *counts])
        self._open, self._going_before = set(range(len(requests))), total
        self._alive = torch.arange(total, device=device)
        self._going = torch.ones(total, dtype=torch.bool, device=device)
        self._tokens = torch.zeros((total, width), dtype=torch.int32, device=device)
        self._logprobs = torch.zeros((total, width), dtype=torch.float32, device=device)
        self._versions = torch.zeros((total, width), dtype=torch.int32, device=device)
        self._lengths = torch.zeros(total, dtype=torch.long, device=device)
        self._stopped = torch.zeros(total, dtype=torch.bool, device=device)
        self._step = 0

    def take(self, logits: Tensor, version: int) -> Tensor:
        """Choose the next token of every sample of the batch, `[batch]`, from a version's `logits [batch, vocab]`."""
        alive = self._alive
        scaled = logits.float() / self._temperature[alive]
        logprobs = scaled.log_softmax(-1)
        allowed = self._allowed(logprobs)
        choice = _choose(allowed, self._top_p[alive], self._uniforms[alive, self._step])
        tokens = torch.where(self._greedy[alive], allowed.argmax(-1), choice)
        going = self._going
        rows = alive[going]
        self._tokens[rows, self._step] = tokens[going].int()
        self._logprobs[rows, self._step] = logprobs.gather(1, tokens[:, None])[going, 0]
        self._versions[rows, self._step] = version
        self._lengths[rows] += 1
        stopped = torch.isin(tokens, self._stops) & going
        self._stopped[alive[stopped]] = True
        self._step += 1
        self._going = going & ~stopped & (self._limit[alive] > self._step)
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        self.positions = self.positions + 1
        return tokens

    def _allowed(self, logprobs: Tensor) -> Tensor:
        """Log-probs with the stop tokens taken out where it is too early for them."""
        if not self._may_refuse:
            return logprobs
        early = (self._least[self._alive] > self._step)[:, None]
        stops = torch.zeros(logprobs.shape[1], dtype=torch.bool, device=logprobs.device)
        stops[self._stops] = True
        return logprobs.masked_fill(early & stops, float("-inf"))

    @property
    def alive(self) -> Tensor:
        """Numbers of the samples that are in the batch."""
        return self._alive

    @property
    def finished(self) -> bool:
        """Whether no sample goes on."""
        return not bool(self._going.any())

    def shrink(self) -> Tensor | None:
        """Leave ended samples out once they are half of the batch; gives the places kept."""
        going = int(self._going.sum())
        if going * 2 > len(self._going):
            return None
        keep = self._going.nonzero()[:, 0]
        self._alive, self._going = self._alive[keep], self._going[keep]
        self.mask, self.positions = self.mask[keep], self.positions[keep]
        return keep

    def so_far(self) -> Tensor:
        """Prompts and what was generated of the samples in the batch, laid out as `mask`."""
        prompts = self.prompts.repeat_interleave(self.repeats_tensor, dim=0)[self._alive]
        return torch.cat([prompts, self._tokens[self._alive, : self._step].long()], dim=1)

    def ended(self) -> list[int]:
        """Requests whose last sample has ended since this was asked before."""
        before, self._going_before = self._going_before, int(self._going.sum())
        if self._going_before == before:
            return []
        going = self._alive[self._going].cpu().numpy()
        left = set((np.searchsorted(self._begins, going, "right") - 1).tolist())
        found, self._open = sorted(self._open - left), left
        return found

    def result(self, i: int, experts: RecordedExperts | None) -> list[Generation]:
        """The samples of a request that has ended."""
        its = slice(self._begins[i], self._begins[i + 1])
        lengths, stopped = self._lengths[its].tolist(), self._stopped[its].tolist()
        routed = experts.of(i, lengths) if experts is not None else [None] * len(lengths)
        tokens, logprobs, versions = (
            array[its].cpu().numpy() for array in (self._tokens, self._logprobs, self._versions)
        )
        group = []
        for k, n in enumerate(lengths):
            reason = FinishReason.STOP if stopped[k] else FinishReason.LENGTH
            found, scores, wrote = (array[k, :n].copy() for array in (tokens, logprobs, versions))
            group.append(Generation(found, scores, wrote, reason, routed[k]))
        return group


def _uniforms(request: GenerationRequest, width: int) -> NDArray[Any]:
    """`[samples, width] float64` in [0, 1), from the request's seed alone; zeros from `max_tokens` on."""
    generator = np.random.Generator(np.random.Philox(key=request.seed))
    drawn = generator.random((request.samples, request.max_tokens))
    return np.pad(drawn, ((0, 0), (0, width - request.max_tokens)))


def _choose(logprobs: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverting the distribution function: `[batch]` token ids from one uniform number each."""
    probs = logprobs.double().exp()
    if bool((top_p < 1).any()):
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        # The smallest set that reaches top_p: a token is in it if those before it do not reach it yet.
        ordered = ordered * (ordered.cumsum(-1) - ordered < top_p)
        probs = torch.zeros_like(probs).scatter(1, order, ordered)
    cumulative = probs.cumsum(-1)
    index = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(-1)
    # A uniform next to 1 may step over the last token by rounding.
    last = (probs > 0).cumsum(-1).argmax(-1)
    return torch.minimum(index, last)


def _refuse_mixed(counts: list[int]) -> int:
    msg = f"requests with {sorted(set(counts))} samples cannot share a batch; pass those of one number together"
    raise ValueError(msg)
