"""Towers whose work the ranks of one model share: each medium is encoded by one of them.

Tensor-, context- and pipeline-parallel ranks read the same micro-batches. Within a pipeline stage they encode the
media of each micro-batch when it begins. Stages reach a micro-batch at different times, so with several of them all
ranks encode the media of all micro-batches before the first one, and traverse the towers backward after the last one.
Stages other than the first have a copy of the towers, which gets the weights of the first stage after they changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, distributed
from transformers import PreTrainedModel

from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore import process_groups
from relax_actors.engines.megatron.tower_shares import Features, Group, TowerShares
from relax_actors.engines.protocols.media import MediaItem, PromptMedia
from relax_actors.engines.torch.towers import Encoded, encode, encode_works, works_of
from relax_actors.media.family import Family


class SharedTowers:
    """Towers of one model on this rank. Methods are collective: the ranks of the model call them in the same order.

    Args:
        module: the towers, or on stages other than the first a copy of them.
        family: of the model.
        features: sizes of what the towers compute.
        layout: of the ranks.
        recomputes: whether towers that are traversed backward later are then computed again, instead of keeping their
            activations.
    """

    def __init__(
        self, module: PreTrainedModel, family: Family, features: Features, layout: Layout, *, recomputes: bool
    ) -> None:
        self._module, self._family, self._features = module, family, features
        self._layout, self._recomputes = layout, recomputes
        self._is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        shares = layout.shares_towers and layout.ranks > layout.data
        self._group = process_groups.model_group(layout) if shares else None
        self._ranks: int = 1 if self._group is None else self._group.size()
        self._rank: int = 0 if self._group is None else self._group.rank()
        if not self._is_first:
            module.requires_grad_(False)
        self._gradients: dict[Tensor, Tensor] = {}
        # Whether the copies have the weights of the first stage.
        self._is_current = False

    @property
    def spans_stages(self) -> bool:
        """Whether pipeline stages share the towers, which are then traversed backward once for all micro-batches."""
        return self._ranks > 1 and self._layout.pipeline > 1

    @property
    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def encode(self, media: Sequence[PromptMedia]) -> Encoded:
        """Encode the media of a micro-batch with the ranks of this pipeline stage, at least one item."""
        if self._ranks == 1:
            return encode(self._module, self._family, media)
        shares = TowerShares.of(works_of(media), self._ranks, self._features)
        own = self._encode_own(shares.groups(self._rank), shares.longest)
        whole: Tensor = _Gather.apply(own, self._group)  # type: ignore[no-untyped-call]
        return shares.select(whole, media)

    @contextmanager
    def ahead(
        self, media: Sequence[PromptMedia], most: int, progress: Callable[[], None], *, trains: bool
    ) -> Iterator[Ahead | None]:
        """Encode the media of all micro-batches of a call; the towers are traversed backward at the end.

        Args:
            media: distinct media of all micro-batches of this rank.
            most: largest number of embeddings that the towers compute at once, unless a medium has more.
            progress: called whenever the towers have computed so many, forward or again for the backward pass.
            trains: whether the micro-batches are traversed backward.

        Yields:
            What was encoded; None on stages that do not read it, if each micro-batch encodes its own media, or without
            any.
        """
        if not self.spans_stages or not media:
            yield None
            return
        self._follow()
        shares = TowerShares.of(works_of(media), self._ranks, self._features)
        groups = list(shares.groups(self._rank, most))
        trains = trains and torch.is_grad_enabled() and bool(self._parameters)
        with torch.set_grad_enabled(trains and not self._recomputes):
            own = self._encode_own(groups, shares.longest, progress)
        whole = own.new_empty((self._ranks * shares.longest, own.shape[1]))
        distributed.all_gather_into_tensor(whole, own.detach(), group=self._group)
        # Gradients of all micro-batches are summed in it.
        leaf = whole.float().requires_grad_(trains) if self._is_first else None
        del whole
        yield None if leaf is None else Ahead(shares, leaf, own.dtype)
        if trains:
            self._backward(groups, own, self._part_of(leaf, shares), progress)

    def _part_of(self, leaf: Tensor | None, shares: TowerShares) -> Tensor:
        """Return the gradient of what this rank encoded, `[longest, hidden] float32`; the first stage has that of all.

        Its tensor-parallel ranks have the same, and context-parallel ranks those of other tokens, which are summed.
        """
        part = torch.empty((shares.longest, self._features.hidden), dtype=torch.float32, device=self._module.device)
        parts: list[Tensor] | None = None
        if leaf is not None and not parallel_state.get_tensor_model_parallel_rank():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            distributed.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
            parts = list(torch.split(gradient, shares.longest)) if self._rank == 0 else None
        group: Any = self._group  # there is one where several stages share the towers
        distributed.scatter(part, parts, distributed.get_global_rank(group, 0), group=group)
        return part

    def _backward(self, groups: Sequence[Group], own: Tensor, gradient: Tensor, progress: Callable[[], None]) -> None:
        """Traverse the towers backward, with the gradient of what this rank encoded."""
        part = gradient.to(own.dtype)
        if not self._recomputes:
            own.backward(part)  # type: ignore[no-untyped-call]
            progress()
        else:
            for works, rows in groups:
                self._computed(works).backward(part[rows.to(part.device)])  # type: ignore[no-untyped-call]
                progress()
        if not self._is_first:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    sums = self._gradients.setdefault(parameter, torch.zeros_like(parameter, dtype=torch.float32))
                    sums += parameter.grad
                    parameter.grad = None

    def _encode_own(self, groups: Iterable[Group], longest: int, progress: Callable[[], None] = lambda: None) -> Tensor:
        """Encode the media of this rank, `[longest, hidden]`: embeddings, features of each deepstack layer, padding."""
        own = torch.zeros((longest, self._features.hidden), dtype=self._module.dtype, device=self._module.device)
        computed, places = list[Tensor](), list[Tensor]()
        for works, rows in groups:
            computed.append(self._computed(works))
            places.append(rows)
            progress()
        if computed:
            own = own.index_copy(0, torch.cat(places).to(own.device), torch.cat(computed))
        if torch.is_grad_enabled() and self._parameters and not own.requires_grad:
            own.requires_grad_()  # ranks without media take part in the backward passes of the others
        return own

    def _computed(self, works: Sequence[list[MediaItem]]) -> Tensor:
        encoded = encode_works(self._module, self._family, works)
        return torch.cat([encoded.embeddings, *encoded.deepstack])

    @torch.no_grad()
    def _follow(self) -> None:
        """Copy the weights of the first stage to the others, if they have changed."""
        if self._is_current:
            return
        group = parallel_state.get_pipeline_model_parallel_group()
        first = parallel_state.get_pipeline_model_parallel_first_rank()
        for parameter in self._module.parameters():
            distributed.broadcast(parameter.data, first, group=group)
        self._is_current = True

    def invalidate(self) -> None:
        """Have the copies get the weights again; call it on all ranks when those of the first stage have changed."""
        self._is_current = False

    def end_step(self) -> None:
        """Have the copies get the weights that the optimizer has changed."""
        if self._parameters:
            self.invalidate()

    def copies(self) -> list[Tensor]:
        """Return the weights and gradients of a copy, which no model chunk has; none on the first stage."""
        return [] if self._is_first else [*self._module.parameters(), *self._gradients.values()]

    def share_frozen(self) -> None:
        """Train on all stages what the first stage trains; the optimizer calls it before it is built."""
        if not self.spans_stages:
            return
        every = list(self._module.parameters())
        flags = torch.tensor([one.requires_grad for one in every], dtype=torch.uint8, device=self._module.device)
        first = parallel_state.get_pipeline_model_parallel_first_rank()
        distributed.broadcast(flags, first, group=parallel_state.get_pipeline_model_parallel_group())
        for parameter, flag in zip(every, flags.tolist(), strict=True):
            parameter.requires_grad_(bool(flag))

    def zero_grad(self) -> None:
        """Set the gradients of a copy to 0."""
        self._gradients = {}

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum gradients over tensor-parallel ranks and stages; megatron-core sums them over data and context."""
        group = parallel_state.get_model_parallel_group()
        if self._ranks == 1 or group.size() == 1:
            return
        for parameter in self._parameters:
            if self._is_first:
                own: Tensor | None = parameter.main_grad  # type: ignore[attr-defined]
            else:
                own = self._gradients.pop(parameter, None)
            summed = torch.zeros_like(parameter, dtype=torch.float32) if own is None else own
            distributed.all_reduce(summed, group=group)


class Ahead:
    """Media that were encoded before the micro-batches that read them.

    Args:
        shares: which rank encoded what.
        whole: `[ranks * longest, hidden] float32`, what all ranks encoded.
        dtype: of the towers.
    """

    def __init__(self, shares: TowerShares, whole: Tensor, dtype: torch.dtype) -> None:
        self._shares, self._whole, self._dtype = shares, whole, dtype

    def encoded(self, media: Sequence[PromptMedia]) -> Encoded:
        """Return the embeddings of the media of a micro-batch, as `encode` does."""
        return self._shares.select(self._whole, media, self._dtype)


class _Gather(torch.autograd.Function):
    """Concatenation over ranks; in backward each rank has the gradient of its own part.

    Tensor-parallel ranks have equal gradients; those of context-parallel ranks, which read other tokens, are summed.
    """

    @staticmethod
    def forward(context: Any, own: Tensor, group: Any) -> Tensor:
        context.rows = slice(group.rank() * len(own), (group.rank() + 1) * len(own))
        whole = own.new_empty((group.size() * len(own), own.shape[1]))
        distributed.all_gather_into_tensor(whole, own.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        if parallel_state.get_context_parallel_world_size() > 1:
            gradient = gradient.contiguous()
            distributed.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
        return gradient[context.rows], None
