"""Ranks that share torch models with FSDP2: each holds some rows of every weight, gradient and state of the optimizer.

Layers and, as one more unit, everything else are gathered while they compute. All ranks therefore run the same number
of forward and backward passes, and each reads weights within `within` alone. Gradients are summed over ranks, not
averaged: the loss of a micro-batch is a sum, which the totals of the step divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from relax_actors.engines.ranks.collectives import all_gather_messages, join
from relax_actors.engines.ranks.dealing import Entry, deal
from relax_actors.engines.torch.model import own_rows
from relax_actors.engines.torch.multimodal import decoder_of
from relax_actors.engines.torch.sharding import Make, Whole
from relax_actors.errors import ConfigError
from relax_actors.media.family import Family
from relax_actors.weights import files as weights
from relax_actors.weights import part_files
from relax_actors.weights.encoder import Take, WeightSource
from relax_actors.weights.part_files import Part

T = TypeVar("T")
DRAWN = 65521
"""Different numbers that weights have before they are loaded; a prime, so that rows of a matrix differ."""


class _Root(nn.Module):
    """Calls functions within its forward pass, in which FSDP2 gathers the weights of the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


@dataclass(frozen=True, slots=True)
class _Sharded:
    """A model with its root, and the modules and names of its weights outside of layers; `towers` are some of them."""

    root: _Root
    rest: list[tuple[nn.Module, str]]
    towers: list[tuple[nn.Module, str]]


class FullySharded(Whole):
    """Shares models with other ranks; see `Whole`.

    Args:
        rank: number of this process.
        count: number of ranks.
        store: rendezvous of the ranks.
        device: device of this rank.
        dtype: dtype of the computation; layers are gathered in it. Weights and gradients are in float32.
        offload: keep weights, gradients and the optimizer's state in host memory between passes.
    """

    def __init__(
        self, rank: int, count: int, store: Store, device: torch.device, dtype: torch.dtype, *, offload: bool = False
    ) -> None:
        super().__init__(device)
        self.rank, self.count = rank, count
        join(rank, count, store, torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device)
        self._settings: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (count,)),
            "offload_policy": CPUOffloadPolicy() if offload and device.type == "cuda" else OffloadPolicy(),
        }
        self._layer_settings = self._settings
        if dtype != torch.float32:
            policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
            self._layer_settings = self._settings | {"mp_policy": policy}
        self._sharded: dict[int, _Sharded] = {}

    @property
    def is_whole(self) -> bool:
        """Whether this process holds whole tensors."""
        return False

    def build(self, make: Make, family: Family | None) -> PreTrainedModel:
        """Build a model, which gets its memory layer by layer; see `Whole`.

        Raises:
            ConfigError: it cannot be built, or transformers names no layers of it.
        """
        with _without_memory():
            model = make(None)
        decoder = model.base_model if family is None else decoder_of(model)
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
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        rest = list(_weights_outside(root, layers))
        read = {id(module) for part in (decoder, head) if part is not None for module in part.modules()}
        towers = [(module, name) for module, name in rest if family is not None and id(module) not in read]
        self._share(root, self._settings)
        self._sharded[id(model)] = _Sharded(root, rest, towers)
        return model

    def _share(self, module: nn.Module, settings: Mapping[str, Any]) -> None:
        _give_memory(module, self.device)
        shared = fully_shard(module, **settings)
        if not hasattr(shared, "set_force_sum_reduction_for_comms"):
            msg = f"trainer.torch and critic.torch need torch 2.9 or newer to share a model, not {torch.__version__}"
            raise ConfigError(msg)
        # Summed, which every backend can do.
        shared.set_gradient_divide_factor(1.0)
        shared.set_force_sum_reduction_for_comms(enable=True)

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

    def zero(self, model: PreTrainedModel, *, towers_only: bool = False) -> Tensor | float:
        """Return a 0 whose gradient with respect to weights is 0; see `Whole`. Only within `within`."""
        found = self._sharded[id(model)]
        read = [getattr(module, name) for module, name in (found.towers if towers_only else found.rest)]
        return sum((0.0 * weight.flatten()[0] for weight in read if weight.requires_grad), start=0.0)

    def all_gather(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, by rank."""
        return all_gather_messages(message)

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Clip gradients to a norm, and return the norm that they had, in all ranks together."""
        own = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        norms = [float(norm) for norm in self.all_gather(float(nn.utils.get_total_norm(own)))]
        norm = math.sqrt(sum(norm * norm for norm in norms))
        if norm > max_norm:
            for gradient in own:
                gradient.mul_(max_norm / (norm + 1e-6))
        return norm

    def source(
        self, read: Callable[[], Mapping[str, Tensor]], dtype: torch.dtype, lock: AbstractContextManager[Any]
    ) -> WeightSource:
        """Return the weights that are published, each rank its share; see `Whole`."""
        del lock  # what is shared moves nowhere between passes
        return SharedSource(read(), dtype, self)

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

    def own(self, like: Tensor, whole: Tensor) -> Tensor:
        """Return a copy of the rows of this rank; see `Whole`."""
        if not isinstance(like, DTensor):
            return whole.clone()
        rows = whole[own_rows(like)].clone().to(like.to_local().device)
        return DTensor.from_local(
            rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


class SharedSource:
    """Weights of a model whose rows are on several ranks; implements `WeightSource`.

    All ranks gather one tensor after the other; the rank that owns it keeps it. The weights are looked up once, before
    any pass: within one, FSDP2 would stop it to shard the model again. Training changes them in place.

    Args:
        tensors: weights of the model, by name.
        dtype: in which they are published.
        ranks: who shares them.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, ranks: FullySharded) -> None:
        self._tensors, self._dtype, self._sharding = dict(sorted(tensors.items())), dtype, ranks
        self.rank, self.ranks = ranks.rank, ranks.count

    def _owners(self, files: int) -> dict[str, int]:
        entries = [Entry(tensor.numel(), range(self.ranks)) for tensor in self._tensors.values()]
        return dict(zip(self._tensors, deal(entries, files), strict=True))

    def forms(self, files: int) -> Mapping[str, weights.TensorForm]:
        """Return the forms of the tensors that this rank owns; see `WeightSource`."""
        owners = self._owners(files)
        return {
            name: weights.TensorForm(self._dtype, tuple(tensor.shape))
            for name, tensor in self._tensors.items()
            if owners[name] == self.rank
        }

    @torch.no_grad()
    def visit(self, take: Take, files: int) -> str:
        """Gather each tensor, and pass it to `take` of the rank that owns it; see `WeightSource`."""
        owners, digest = self._owners(files), weights.Fingerprint()
        failure: Exception | None = None
        for name, tensor in self._tensors.items():
            whole = self._sharding.gather(tensor, self._dtype)
            if self.rank == 0:
                digest.add(name, whole)
            if self.rank == owners[name] and failure is None:
                try:
                    take(name, whole)
                except Exception as error:  # noqa: BLE001 raised below: the other ranks need this one until then
                    failure = error
        (found, *_) = self._sharding.all_gather(digest.hexdigest())
        if failure is not None:
            raise failure
        return str(found)

    def total(self, number: int) -> int:
        """Return the sum of a number over all ranks."""
        return sum(self._sharding.all_gather(number))


def _local(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _forget_pass(root: Any) -> None:
    """Free what a pass without gradients, or one that failed, left gathered: no backward pass does."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:  # before torch 2.13
        root.reshard()


@contextmanager
def _without_memory() -> Iterator[None]:
    """Leave parameters without memory while a model is built; buffers get their values."""

    def to_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # it may return one
    try:
        yield
    finally:
        handle.remove()


def _give_memory(module: nn.Module, device: torch.device) -> None:
    """Fill parameters without memory with numbers, the same on all ranks, and move buffers to the device."""
    drawn = 0.02 * torch.randn(DRAWN, generator=torch.Generator().manual_seed(0))
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied weights once
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.is_meta and parameter not in made:
                times = -(-parameter.numel() // DRAWN)
                values = drawn.to(device, parameter.dtype).repeat(times)[: parameter.numel()].view(parameter.shape)
                made[parameter] = nn.Parameter(values.clone(), requires_grad=parameter.requires_grad)
            if parameter in made:
                setattr(part, name, made[parameter])
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))


def _weights_outside(root: nn.Module, layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Yield modules and names of the weights of a model that are not in its layers."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in root.modules():
        if id(module) not in inside:
            yield from ((module, name) for name, _ in module.named_parameters(recurse=False))
