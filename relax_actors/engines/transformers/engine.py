"""Inference engine with a transformers model in this process and its own sampling loop.

The loop exists because the random numbers of a sample must depend on its row's seed alone, every token needs its
log-prob, and a prompt is prefilled once for its whole group. On small models it also has less overhead per token than
`generate` (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache

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
from relax_actors.engines.torch.swappable_model import SwappableModel
from relax_actors.engines.transformers.batch_media import BatchMedia, Reading
from relax_actors.engines.transformers.expert_recorder import ExpertRecorder
from relax_actors.engines.transformers.lockstep_batch import LockstepBatch
from relax_actors.engines.transformers.reserved_cache import reserved_cache
from relax_actors.media.family import family_of


class TransformersEngine(SwappableModel, GenerateMixin):
    """Generates with the model of a model folder; implements `InferenceEngine`.

    Args:
        path: model folder.
        device: torch device.
        dtype: of the computation.
        records_experts: whether generations include the chosen experts.

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
    ) -> None:
        super().__init__(path, device, dtype)
        self._routers = Routers(self._model) if records_experts else None
        self._family = family_of(path)
        self._barred = BarredIds(self._family, self._device)
        pad = self._model.config.get_text_config().pad_token_id
        self._pad = 0 if pad is None else int(pad)

    @property
    def context_length(self) -> int:
        """Largest number of tokens of prompt and completion together."""
        return context_length(self._model)

    @torch.inference_mode()
    def stream(
        self,
        requests: Sequence[GenerationRequest],
        progress: Callable[[], None],
        refresh: Refresh | None = None,
        more: MoreRequests = no_more_requests,
    ) -> Iterator[Done]:
        """Generate all samples as one batch, which no other rows join; see `InferenceEngine`."""
        del more
        version = self.require_weights()
        batch = LockstepBatch(requests, self._pad, self._device)
        experts = ExpertRecorder([r.samples for r in requests]) if self._routers is not None else None
        media = None if self._family is None else BatchMedia(self._family, requests, self._device)
        cache = self._empty_cache(batch)
        reading = self._prefill_inputs(batch.prompt_mask, media, range(len(requests)))
        logits, chosen = self._forward(batch.prompts, cache, reading)
        # Each prompt is prefilled once, then repeated for its samples.
        cache.batch_repeat_interleave(batch.repeats)
        logits = logits.repeat_interleave(batch.repeats_tensor, dim=0)
        if experts is not None and chosen is not None:
            experts.record_prompts(chosen, [len(r.tokens) for r in requests])
        while True:
            progress()
            tokens = batch.sample(logits, version)
            if ended := batch.ended():
                yield [(i, batch.result(i, experts)) for i in ended]
            if batch.finished:
                return
            if (keep := batch.shrink()) is not None:
                cache.batch_select_indices(keep)
                tokens = tokens[keep]
            if refresh is not None and refresh():
                version = self.require_weights()
                # A cache of the old weights would give log-probs that belong to no version.
                cache = self._empty_cache(batch)
                reading = self._prefill_inputs(batch.mask, media, batch.owners)
                logits, chosen = self._forward(batch.all_tokens(), cache, reading)
            else:
                positions = batch.positions[:, None] if media is None else media.next_positions(batch)
                logits, chosen = self._forward(tokens[:, None], cache, Reading(batch.mask, positions))
            if experts is not None and chosen is not None:
                experts.record_step(chosen[:, -1], batch.alive)

    def _empty_cache(self, batch: LockstepBatch) -> Cache:
        return reserved_cache(self._model.config.get_text_config(), batch.max_length)

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
        keep = slice(-1, None)
        return multimodal.logits(self._model, tokens, reading.placement, encoded, keep, **settings)[:, -1]
