"""How ranks share a torch model; `Whole` is the case of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from relax_actors.engines.torch.host_memory import Movable, MovableTensors, Tensors
from relax_actors.engines.torch.model import copy_into, tensors_of
from relax_actors.media.family import Family
from relax_actors.weights import files as weights
from relax_actors.weights.encoder import LocalSource, WeightSource

T = TypeVar("T")
PartOfModel = Literal["towers", "head", "rest"]
"""Weights that a micro-batch may not read: of the towers, of an output head of its own, and all others outside of
layers and embeddings, towers included."""
Make = Callable[[torch.device | None], PreTrainedModel]
"""Build a model on a device; None to leave it where it was built."""


class Whole:
    """Holds whole models in one process; `FullySharded` shares them with other ranks.

    Methods are collective where there are other ranks: all must call them in the same order.

    Args:
        device: device of the models.

    Attributes:
        rank: number of this process.
        count: number of ranks.
    """

    rank, count = 0, 1

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    @property
    def is_whole(self) -> bool:
        """Whether this process holds whole tensors."""
        return True

    def movable(self, readable: Tensors, others: Tensors) -> Movable:
        """Return what moves an engine's tensors off the device; see `MovableStorages`."""
        return MovableTensors(lambda: [*readable(), *others()], self.device)

    def build(self, make: Make, family: Family | None) -> PreTrainedModel:
        """Build a model; the weights of a shared one are arbitrary.

        Args:
            make: builds it.
            family: family of the model; None if it reads text only.
        """
        del family
        return make(self.device)

    def draw(self, model: PreTrainedModel, make: Make) -> None:
        """Draw the random weights of a model.

        Args:
            model: gets the weights.
            make: builds it with a seed.
        """
        copy_into(model, tensors_of(make(None)), "random initialisation")

    def within(self, model: PreTrainedModel, compute: Callable[[], T]) -> T:
        """Call a function that reads the weights of a model."""
        del model
        return compute()

    def at_head(self, model: PreTrainedModel, hidden: Tensor, compute: Callable[[Tensor], T]) -> T:
        """Call a function of hidden states that reads the output head; it returns tensors that need a gradient."""
        del model
        return compute(hidden)

    def zero(self, model: PreTrainedModel, part: PartOfModel) -> Tensor | float:
        """Return a 0 whose gradient with respect to the weights of a part is 0.

        Gradients are reduced over ranks, so each rank needs one for every weight, also for those that it did not read.
        """
        del model, part
        return 0.0

    def all_gather(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, plain data and arrays, by rank."""
        return [message]

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Clip gradients to a norm, and return the norm that they had."""
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))

    def squares(self, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, float]:
        """Return the sum of the squares of each trained weight's gradients, in float64 and over all ranks, by its name.

        The gradients stay as they are.
        """
        return {name: square(gradient_of(weight)) for name, weight in named if weight.requires_grad}

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of weights that all ranks hold, such as those of an adapter, over the ranks."""
        del parameters

    def gather(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a whole tensor in a dtype."""
        return tensor.detach().to(dtype)

    def source(
        self, read: Callable[[], Mapping[str, Tensor]], dtype: torch.dtype, lock: AbstractContextManager[Any]
    ) -> WeightSource:
        """Return the weights that are published.

        Args:
            read: returns the weights of the model.
            dtype: in which they are published.
            lock: held while they are read.
        """
        return LocalSource(read, dtype, lock)

    def writer(self, tensors: Mapping[str, Tensor], *, copy: bool = False) -> Callable[[Path], None]:
        """Return a function that writes tensors to a safetensors file, in any thread and without other ranks.

        The file is complete when it has returned on all ranks.

        Args:
            tensors: weights or state of an optimizer.
            copy: copy them now, so that they may change before they are written.
        """
        held = {n: t.detach().to("cpu", copy=True) for n, t in tensors.items()} if copy else tensors
        return partial(weights.save, held)

    def local(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor that this process has; they share its memory."""
        return tensor

    def own(self, like: Tensor, whole: Tensor) -> Tensor:
        """Return a copy of a whole tensor, sharded like another one."""
        del like
        return whole.clone()


def gradient_of(weight: nn.Parameter) -> Tensor:
    """Return the gradients of a weight; 0 if no micro-batch has read it yet."""
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def square(tensor: Tensor) -> float:
    """Return the sum of the squares of a tensor, in float64; on a GPU without a copy of the tensor in float64."""
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) ** 2
