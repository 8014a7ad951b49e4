"""Inference engine with a transformers model in this process and its own sampling loop.

The loop exists because the random numbers of a sample must depend on its row's seed alone, every token needs its
log-prob, and a prompt is prefilled once for its whole group. On small models it also has less overhead per token than
`generate` (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.model import context_length
from relax_actors.engines.torch.swappable_model import SwappableModel
from relax_actors.engines.transformers.expert_recorder import ExpertRecorder
from relax_actors.engines.transformers.lockstep_batch import LockstepBatch
from relax_actors.engines.transformers.reserved_cache import reserved_cache


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
        pad = self._model.config.pad_token_id
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
        cache = reserved_cache(self._model.config, batch.max_length)
        logits, chosen = self._prefill(batch.prompts, batch.prompt_mask, cache)
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
                cache = reserved_cache(self._model.config, batch.max_length)
                logits, chosen = self._prefill(batch.all_tokens(), batch.mask, cache)
            else:
                logits, chosen = self._forward(tokens[:, None], batch.mask, batch.positions[:, None], cache)
            if experts is not None and chosen is not None:
                experts.record_step(chosen[:, -1], batch.alive)

    def _prefill(self, tokens: Tensor, mask: Tensor, cache: Cache) -> tuple[Tensor, Tensor | None]:
        """Fill an empty cache with tokens padded on the left; return the results of `_forward`."""
        return self._forward(tokens, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)

    def _forward(self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> tuple[Tensor, Tensor | None]:
        """Run the model; return the last logits, and the chosen experts if they are recorded.

        Returns:
            `[batch, vocab]` and `[batch, tokens, layers, experts_of_token] int64`.
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
