"""Ranks that share torch models with FSDP2: each holds some rows of every weight, gradient and state of the optimizer.

Layers, embeddings, the output head and, as one more unit, everything else are gathered while they compute. All ranks
therefore run the same number of forward and backward passes, and each reads weights within `within` alone, those of the
head within `at_head`. Gradients are summed over ranks, not averaged: the loss of a micro-batch is a sum, which the
totals of the step divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from relax_actors.engines.ranks.collectives import all_gather_messages, join
from relax_actors.engines.torch.host_memory import Movable, MovableStorages, Tensors
from relax_actors.engines.torch.model import own_rows, rows_of
from relax_actors.engines.torch.module_memory import draw, give_memory, without_memory
from relax_actors.engines.torch.multimodal import decoder_of
from relax_actors.engines.torch.sharding import Make, PartOfModel, Whole, gradient_of, square
from relax_actors.engines.torch.shared_source import SharedSource
from relax_actors.errors import ConfigError
from relax_actors.media.family import Family
from relax_actors.weights import part_files
from relax_actors.weights.encoder import WeightSource
from relax_actors.weights.part_files import Part

T = TypeVar("T")


class _Root(nn.Module):
    """Calls functions within its forward pass, in which FSDP2 gathers the weights of the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


@dataclass(frozen=True, slots=True)
class _Sharded:
    """A model with its root, its head if that is a unit, and the modules and names of the weights of its parts."""

    root: _Root
    head: Any
    parts: Mapping[PartOfModel, list[tuple[nn.Module, str]]]


class FullySharded(Whole):
    """Shares models with other ranks; see `Whole`.

    Args:
        rank: number of this process.
        count: number of ranks.
        store: rendezvous of the ranks.
        device: device of this rank.
        dtype: dtype of the computation; layers are gathered in it. Weights and gradients are in float32.
        head_dtype: dtype of the computation of logits; an output head of its own is gathered in it.
        offload: keep weights, gradients and the optimizer's state in host memory between passes.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        store: Store,
        device: torch.device,
        dtype: torch.dtype,
        head_dtype: torch.dtype,
        *,
        offload: bool = False,
    ) -> None:
        super().__init__(device)
        self.rank, self.count = rank, count
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            torch.cuda.set_device(device)
        join(rank, count, store, device)
        self._settings: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (count,)),
            "offload_policy": CPUOffloadPolicy() if offload and device.type == "cuda" else OffloadPolicy(),
        }
        policies = (MixedPrecisionPolicy(d, torch.float32, cast_forward_inputs=False) for d in (dtype, head_dtype))
        self._layer_settings, self._head_settings = (self._settings | {"mp_policy": policy} for policy in policies)
        self._sharded: dict[int, _Sharded] = {}

    @property
    def is_whole(self) -> bool:
        """Whether this process holds whole tensors."""
        return False

    def movable(self, readable: Tensors, others: Tensors) -> Movable:
        """Return what moves the rows of this rank, which FSDP2 has views of; see `Whole`."""
        return MovableStorages(lambda: map(_local, readable()), lambda: map(_local, others()))

    def build(self, make: Make, family: Family | None) -> PreTrainedModel:
        """Build a model, which gets its memory layer by layer; see `Whole`.

        Raises:
            ConfigError: it cannot be built, or transformers names no layers of it.
        """
        with without_memory():
            model = make(None)
        decoder: Any = model.base_model if family is None else decoder_of(model)
        layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            msg = (
                f"transformers names no layers of the model {model.config.model_type}, which ranks of the torch engine "
                "share one by one; leave torch.ranks and torch.offload out, or use Megatron-Core"
            )
            raise ConfigError(msg)
        for layer in layers:
            self._share(layer, self._layer_settings)
        root = _Root(model)
        embeddings, head = decoder.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
        units = self._share_ends(embeddings, head)
        rest = list(_weights_outside(root, [*layers, *units]))
        read = {id(module) for part in (decoder, head) if part is not None for module in part.modules()}
        towers = [(module, name) for module, name in rest if family is not None and id(module) not in read]
        own = head if head in units else None
        of_head = [] if own is None else [(own, name) for name, _ in own.named_parameters()]
        self._share(root, self._settings)
        self._sharded[id(model)] = _Sharded(root, own, {"rest": rest, "towers": towers, "head": of_head})
        return model

    def _share_ends(self, embeddings: Any, head: Any) -> list[nn.Module]:
        """Share embeddings and output head one by one, unless they are the same weight, which both ends then keep.

        A value head is small, and computes outside of `at_head`.
        """
        if head is None or head.weight.shape != embeddings.weight.shape:
            units = [embeddings]
        else:
            units = [] if head.weight is embeddings.weight else [embeddings, head]
        for unit in units:
            self._share(unit, self._head_settings if unit is head else self._settings)
        if embeddings in units:
            embeddings.set_unshard_in_backward(False)  # the gradient needs no weight
        if head in units:
            head.read = MethodType(_read, head)
            register_fsdp_forward_method(head, "read")
        return units

    def _share(self, module: nn.Module, settings: Mapping[str, Any]) -> None:
        give_memory(module, self.device)
        shared = fully_shard(module, **settings)
        if not hasattr(shared, "set_force_sum_reduction_for_comms"):
            msg = f"trainer.torch and critic.torch need torch 2.9 or newer to share a model, not {torch.__version__}"
            raise ConfigError(msg)
        # Summed, which every backend can do.
        shared.set_gradient_divide_factor(1.0)
        shared.set_force_sum_reduction_for_comms(enable=True)

    def draw(self, model: PreTrainedModel, make: Make) -> None:
        """Draw random weights, of which this rank keeps its rows; see `Whole`."""

        def own(tensor: Tensor) -> Tensor:
            return tensor[rows_of(tensor.shape[0], self.rank, self.count)].clone()

        known = model.state_dict(keep_vars=True)
        for name, rows in draw(partial(make, None), own).items():
            _local(known[name]).detach().copy_(rows)

    def within(self, model: PreTrainedModel, compute: Callable[[], T]) -> T:
        """Call a function with the weights outside of layers gathered; those of layers are while they compute.

        With gradients it must return a loss as its only tensor that needs one.
        """
        root = self._sharded[id(model)].root
        try:
            result: T = root(compute)
        except BaseException:
            _forget_pass(root)
            raise
        if not torch.is_grad_enabled():
            _forget_pass(root)
        return result

    def at_head(self, model: PreTrainedModel, hidden: Tensor, compute: Callable[[Tensor], T]) -> T:
        """Call a function of hidden states with the output head gathered; see `Whole`. Only within `within`."""
        head = self._sharded[id(model)].head
        found: T = compute(hidden) if head is None else head.read(hidden, compute)
        return found

    def zero(self, model: PreTrainedModel, part: PartOfModel) -> Tensor | float:
        """Return a 0 whose gradient is 0; see `Whole`. Only within `within`, for the head within `at_head`."""
        read = [getattr(module, name) for module, name in self._sharded[id(model)].parts[part]]
        return sum((0.0 * weight.flatten()[0] for weight in read if weight.requires_grad), start=0.0)

    def all_gather(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, by rank."""
        return all_gather_messages(message)

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Clip gradients to a norm, and return the norm that they had, in all ranks together."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        own = [_local(gradient) for gradient in gradients if isinstance(gradient, DTensor) or not self.rank]
        norms = [float(norm) for norm in self.all_gather(float(nn.utils.get_total_norm(own)))]
        norm = math.sqrt(sum(norm * norm for norm in norms))
        if norm > max_norm:
            for gradient in gradients:
                _local(gradient).mul_(max_norm / (norm + 1e-6))
        return norm

    def squares(self, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, float]:
        """Return the sum of the squares of each weight's gradients, of which ranks have rows; see `Whole`."""
        own: dict[str, float] = {}
        for name, weight in named:
            if not weight.requires_grad:
                continue
            gradient = _local(gradient_of(weight))
            if not isinstance(weight, DTensor):  # of this rank alone, until `sum_gradients`
                gradient = gradient.clone()
                distributed.all_reduce(gradient)
                gradient = gradient if self.rank == 0 else gradient[:0]
            own[name] = square(gradient)
        everyone = self.all_gather(own)
        return {name: sum(one[name] for one in everyone) for name in own}

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of weights that FSDP2 does not know; see `Whole`."""
        known = [p.grad for p in parameters if p.grad is not None and not isinstance(p, DTensor)]
        if not known:
            return
        flat = torch.cat([gradient.flatten() for gradient in known])
        distributed.all_reduce(flat)
        for gradient, part in zip(known, torch.split(flat, [gradient.numel() for gradient in known]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def source(
        self, read: Callable[[], Mapping[str, Tensor]], dtype: torch.dtype, lock: AbstractContextManager[Any]
    ) -> WeightSource:
        """Return the weights that are published, each rank its share; see `Whole`."""
        return SharedSource(read(), dtype, self, self.gather, lock)

    def gather(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a whole tensor in a dtype; collective."""
        if not isinstance(tensor, DTensor):
            return tensor.detach().to(dtype)
        most = -(-tensor.shape[0] // self.count)
        own = torch.zeros((most, *tensor.shape[1:]), dtype=dtype, device=self.device)
        local = _local(tensor).detach()
        own[: len(local)] = local
        found = torch.empty((most * self.count, *tensor.shape[1:]), dtype=dtype, device=self.device)
        distributed.all_gather_into_tensor(found, own)
        return found[: tensor.shape[0]]

    def writer(self, tensors: Mapping[str, Tensor], *, copy: bool = False) -> Callable[[Path], None]:
        """Return a function that writes the rows of this rank; see `Whole`."""
        return partial(part_files.save, {name: self._part(tensor, copy=copy) for name, tensor in tensors.items()})

    def _part(self, tensor: Tensor, *, copy: bool) -> Part:
        rows, first = _local(tensor).detach(), 0
        if isinstance(tensor, DTensor):
            first = own_rows(tensor).start
        elif self.rank:
            rows = rows.new_empty(0)  # all ranks have it, and the first one writes it
        return Part(rows.to("cpu", copy=True) if copy else rows, tuple(tensor.shape), first)

    def local(self, tensor: Tensor) -> Tensor:
        """Return the rows of this rank; see `Whole`."""
        return _local(tensor)

    def own(self, like: Tensor, whole: Tensor) -> Tensor:
        """Return a copy of the rows of this rank; see `Whole`."""
        if not isinstance(like, DTensor):
            return whole.clone()
        rows = whole[own_rows(like)].clone().to(like.to_local().device)
        return DTensor.from_local(
            rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def _local(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _read(_: nn.Module, hidden: Tensor, compute: Callable[[Tensor], Any]) -> Any:
    """Call a function of hidden states as the forward pass of a head; FSDP2 wants no views."""
    found = compute(hidden)
    if isinstance(found, Tensor):
        return found.clone()
    return tuple(None if tensor is None else tensor.clone() for tensor in found)


def _forget_pass(root: Any) -> None:
    """Free what a pass without gradients, or one that failed, left gathered: no backward pass does."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:  # before torch 2.13
        root.reshard()


def _weights_outside(root: nn.Module, layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Yield modules and names of the weights of a model that are not in its layers."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in root.modules():
        if id(module) not in inside:
            yield from ((module, name) for name, _ in module.named_parameters(recurse=False))
