"""Inference engine with a transformers model in this process and its own sampling loop.

The loop exists because the random numbers of a sample must depend on its row's seed alone, every token needs its
log-prob, and a prompt is prefilled once for its whole group. On small models it also has less overhead per token than
`generate` (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import count, groupby
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from relax_actors.data.grammar import Grammars, GrammarState
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols.inference import (
    Done,
    GenerateMixin,
    GenerationRequest,
    MoreRequests,
    Refresh,
    no_more_requests,
)
from relax_actors.engines.torch import multimodal
from relax_actors.engines.torch.barred import BarredIds
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.model import context_length
from relax_actors.engines.torch.profile import Profiled
from relax_actors.engines.torch.swappable_model import SwappableModel
from relax_actors.engines.torch.trained_weights import AllWeights, TrainedWeights
from relax_actors.engines.transformers.batch_media import BatchMedia, Reading, media_keys
from relax_actors.engines.transformers.expert_recorder import ExpertRecorder
from relax_actors.engines.transformers.grouped_attention import attend_by_groups
from relax_actors.engines.transformers.kept_caches import KeptCache, KeptCaches, cut, fill, is_joinable, join
from relax_actors.engines.transformers.lockstep_batch import LockstepBatch, padded
from relax_actors.engines.transformers.reserved_cache import reserved_cache
from relax_actors.media.family import family_of


class TransformersEngine(SwappableModel, Profiled, GenerateMixin):
    """Generates with the model of a model folder; implements `InferenceEngine`.

    Args:
        path: model folder.
        device: torch device.
        dtype: of the computation.
        records_experts: whether generations include the chosen experts.
        records_entropies: whether generations include entropies.
        kept_bytes: size of the keys and values that are kept between the turns of episodes; None if requests do not
            join a running batch, because the caller has no episodes.
        weights: returns which weights of a model the versions replace; all by default.

    Raises:
        ConfigError: `records_experts` is set, and the model has no supported router.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        records_experts: bool = False,
        records_entropies: bool = False,
        kept_bytes: int | None = None,
        weights: Callable[[PreTrainedModel], TrainedWeights] = AllWeights,
    ) -> None:
        super().__init__(path, device, dtype, weights=weights)
        self._routers = Routers(self._model) if records_experts else None
        self._records_entropies = records_entropies
        self._family = family_of(path)
        attend_by_groups(self._model if self._family is None else multimodal.decoder_of(self._model))
        self._path = path
        self._barred = BarredIds(self._family, self._device)
        pad = self._model.config.get_text_config().pad_token_id
        self._pad = 0 if pad is None else int(pad)
        # Recorded experts are those of a batch that nothing joins.
        joins = kept_bytes is not None and self._routers is None
        self.kept = KeptCaches(kept_bytes or 0) if joins and self._is_joinable() else None

    @property
    def context_length(self) -> int:
        """Largest number of tokens of prompt and completion together."""
        return context_length(self._model)

    def metrics(self) -> dict[str, float]:
        """Return turns of conversations with and without a kept cache."""
        return {} if self.kept is None else {"kept_caches": self.kept.hits, "missing_caches": self.kept.misses}

    def prepare(self, grammar: str) -> None:
        """Compile a grammar; see `InferenceEngine`."""
        self._begin(grammar)

    def _begin(self, grammar: str) -> GrammarState:
        return self._grammars.begin(grammar)

    def release_memory(self, folder: Path | None) -> int:
        """Move weights off the device, and kept caches to host memory; see `ReleasesMemory`."""
        if self.kept is not None:
            self.kept.move(torch.device("cpu"))
        return super().release_memory(folder)

    def resume_memory(self) -> int:
        """Move them back; see `ReleasesMemory`."""
        if self.kept is not None:
            self.kept.move(self._device)
        return super().resume_memory()

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(Tokenizer(self._path))

    @torch.inference_mode()
    def stream(
        self,
        requests: Sequence[GenerationRequest],
        progress: Callable[[], None],
        refresh: Refresh | None = None,
        more: MoreRequests = no_more_requests,
    ) -> Iterator[Done]:
        """Generate all samples as one batch; see `InferenceEngine`.

        Requests join it only if the engine keeps caches of episodes.
        """
        version, numbers = self.require_weights(), count()
        batch, cache, logits, media, experts = self._start(requests, numbers, version)
        while True:
            progress()
            tokens = batch.sample(logits, version)
            ended = batch.ended()
            self._keep_caches(batch, cache, ended, version)
            yield [(batch.numbers[i], batch.result(i, experts)) for i in ended]
            arrived = more(0) if self.kept is not None else ()
            if batch.finished and not arrived:
                return
            refreshed = refresh is not None and refresh()
            if refreshed:
                version = self.require_weights()
            groups = _by_samples(arrived)
            if batch.finished:
                batch, cache, logits, media, experts = self._start(groups.pop(0), numbers, version)
            else:
                if (keep := batch.shrink(all_ended=bool(arrived))) is not None:
                    cache.batch_select_indices(keep)
                    tokens = tokens[keep]
                if refreshed:
                    # A cache of the old weights would give log-probs that belong to no version.
                    cache, tokens = self._empty_cache(batch.max_length), batch.all_tokens()
                    reading = self._prefill_inputs(batch.mask, media, batch.owners)
                else:
                    tokens = tokens[:, None]
                    positions = batch.positions[:, None] if media is None else media.next_positions(batch)
                    reading = Reading(batch.mask, positions)
                logits, chosen = self._forward(tokens, cache, reading)
                if experts is not None and chosen is not None:
                    experts.record_step(chosen[:, -1], batch.alive)
            for group in groups:
                other, own, own_logits, _, _ = self._start(group, numbers, version)
                join(cache, own, batch.absorb(other))
                logits = torch.cat([logits, own_logits])
                media = self._media_of(batch.requests)

    def _start(
        self, requests: Sequence[GenerationRequest], numbers: Iterator[int], version: int
    ) -> tuple[LockstepBatch, DynamicCache, Tensor, BatchMedia | None, ExpertRecorder | None]:
        """Prefill the prompts of a batch; return it with its cache, the last logits, media and recorded experts."""
        own, entropies = [next(numbers) for _ in requests], self._records_entropies
        batch = LockstepBatch(requests, self._pad, self._device, own, self._begin, entropies=entropies)
        experts = ExpertRecorder([r.samples for r in requests]) if self._routers is not None else None
        media = self._media_of(requests)
        cache = self._empty_cache(batch.max_length)
        kept = [self._take_cache(request, version) for request in requests]
        if any(one is not None for one in kept):
            return batch, cache, self._extend(batch, cache, requests, kept, media), media, experts
        reading = self._prefill_inputs(batch.prompt_mask, media, range(len(requests)))
        logits, chosen = self._forward(batch.prompts, cache, reading)
        # Each prompt is prefilled once, then repeated for its samples.
        cache.batch_repeat_interleave(batch.repeats)
        logits = logits.repeat_interleave(batch.repeats_tensor, dim=0)
        if experts is not None and chosen is not None:
            experts.record_prompts(chosen, [len(r.tokens) for r in requests])
        return batch, cache, logits, media, experts

    def _extend(
        self,
        batch: LockstepBatch,
        cache: DynamicCache,
        requests: Sequence[GenerationRequest],
        kept: list[KeptCache | None],
        media: BatchMedia | None,
    ) -> Tensor:
        """Prefill what the kept caches of some requests lack; return the last logits."""
        before = fill(cache, kept)
        lengths = [0 if one is None else one.length for one in kept]
        mask, tokens = padded([r.tokens[n:] for r, n in zip(requests, lengths, strict=True)], self._pad, self._device)
        batch.mask = torch.cat([before, mask], dim=1)
        if media is not None:
            return self._forward(tokens, cache, media.reading_behind(batch.mask, tokens.shape[1], lengths))[0]
        positions = (before.sum(-1, keepdim=True) + mask.cumsum(-1) - 1).clamp(min=0)
        return self._forward(tokens, cache, Reading(batch.mask, positions))[0]

    def _media_of(self, requests: Sequence[GenerationRequest]) -> BatchMedia | None:
        return None if self._family is None else BatchMedia(self._family, requests, self._device)

    def _take_cache(self, request: GenerationRequest, version: int) -> KeptCache | None:
        if self.kept is None or not request.session:
            return None
        return self.kept.take(request.session, request.tokens, version, media_keys(request.media))

    def _keep_caches(self, batch: LockstepBatch, cache: DynamicCache, ended: Sequence[int], version: int) -> None:
        """Keep the caches of requests that have ended, for the next request of their session."""
        if self.kept is None:
            return
        for i in ended:
            if session := batch.requests[i].session:
                place, tokens = batch.place_and_tokens(i)
                # The newest token has not passed through the model yet.
                layers = cut(cache, place, batch.mask[place, :-1])
                self.kept.keep(session, KeptCache(tokens, version, layers, media_keys(batch.requests[i].media)))

    def _is_joinable(self) -> bool:
        joins_images = self._family is not None and self._family.spec.decoder.joins_images
        return is_joinable(self._empty_cache(1)) and not joins_images

    def _empty_cache(self, limit: int) -> DynamicCache:
        return reserved_cache(self._model.config.get_text_config(), limit)

    def _prefill_inputs(self, mask: Tensor, media: BatchMedia | None, owners: Iterable[int]) -> Reading:
        """Return how to read whole sequences of these requests, padded on the left."""
        if media is None:
            return Reading(mask, (mask.cumsum(-1) - 1).clamp(min=0))
        return media.reading(mask, list(owners))

    def _forward(self, tokens: Tensor, cache: Cache, reading: Reading) -> tuple[Tensor, Tensor | None]:
        """Run the model; return the last logits, and the chosen experts if they are recorded.

        Returns:
            `[batch, vocab]` and `[batch, tokens, layers, experts_of_token] int64`.
        """
        chosen: list[Tensor] = []
        with self._routers.recording(chosen) if self._routers is not None else nullcontext():
            logits = self._logits(tokens, cache, reading)
        experts = torch.stack(chosen, 1).view(*tokens.shape, len(chosen), -1) if chosen else None
        return self._barred.cut(logits), experts

    def _logits(self, tokens: Tensor, cache: Cache, reading: Reading) -> Tensor:
        settings = {"attention_mask": reading.mask, "position_ids": reading.positions, "past_key_values": cache}
        if self._family is None:
            last: Tensor = self._model(input_ids=tokens, logits_to_keep=1, **settings).logits[:, -1]
            return last
        encoded = multimodal.encode_placed(self._model, self._family, reading.placement)
        hidden = multimodal.hidden_states(self._model, tokens, reading.placement, encoded, **settings)
        head: torch.nn.Module = self._model.lm_head
        logits: Tensor = head(hidden[:, -1])
        return logits


def _by_samples(requests: Sequence[GenerationRequest]) -> list[list[GenerationRequest]]:
    """Group requests by their number of samples, since a cache repeats all prompts by the same number."""
    return [list(group) for _, group in groupby(requests, key=lambda r: r.samples)]
