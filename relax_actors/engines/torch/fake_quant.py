"""Training for few bits: the model computes with weights on a grid, the optimizer updates copies of them in float32.

The gradient by a weight on the grid is taken for that by its copy (straight-through estimator, Bengio et al. 2013,
arXiv:1308.3432; training for integers, Jacob et al. 2018, arXiv:1712.05877). The weights of the model are therefore
those that are published, and every engine that follows computes with the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from relax_actors.config.training import FakeQuantSection
from relax_actors.engines.torch.sharding import Whole
from relax_actors.errors import ConfigError


def on_grid(weight: Tensor, bits: int, group: int) -> Tensor:
    """Round a weight to the numbers that symmetric integers of few bits and a scale for each group can express.

    For a group w and m = 2^(bits - 1) - 1: s = max|w| / m, rounded to bfloat16, in which scales are stored, and
    Q(w) = s * clamp(round(w / s), -m, m). What is on the grid stays where it is.

    Args:
        weight: `[..., inputs] float32`.
        bits: of an integer.
        group: neighbours along `inputs` that share a scale; divides it.
    """
    most = float(2 ** (bits - 1) - 1)
    groups = weight.reshape(*weight.shape[:-1], -1, group)
    scale = (groups.abs().amax(-1, keepdim=True) / most).bfloat16().float()
    # In a group of zeros any scale will do.
    rounded = (groups / scale.where(scale > 0, 1.0)).round().clamp(-most, most)
    return (rounded * scale).reshape(weight.shape)


class GridWeights:
    """Weights of a model that are kept on the grid, and their copies in float32.

    Args:
        model: the model; its weights are moved to the grid by `take`.
        settings: which weights, and what grid.
        sharding: how ranks share the model: they have different rows, and each whole groups.

    Raises:
        ConfigError: a pattern matches no weight, or a weight has no whole groups.
    """

    def __init__(self, model: PreTrainedModel, settings: FakeQuantSection, sharding: Whole) -> None:
        self._settings, self._sharding = settings, sharding
        self._chosen = dict(_chosen(dict(model.named_parameters()), settings))
        self.copies: dict[nn.Parameter, nn.Parameter] = {}
        """Copy of each weight that is trained."""

    @torch.no_grad()
    def take(self, copies: Mapping[str, Tensor] | None = None) -> None:
        """Make copies of the weights, and move the weights to the grid.

        Args:
            copies: copies of a checkpoint, by name; by default the weights.
        """
        trained = {name: weight for name, weight in self._chosen.items() if weight.requires_grad}
        self.copies = {weight: nn.Parameter(weight.detach().clone()) for weight in trained.values()}
        if copies is not None:
            for name, weight in trained.items():
                rows = self._sharding.local(self._sharding.own(weight, copies[name]))
                self._sharding.local(self.copies[weight].data).copy_(rows)
        for weight in self._chosen.values():
            self._move(weight, self.copies.get(weight, weight))

    @torch.no_grad()
    def follow(self) -> None:
        """Move the trained weights to the points of the grid next to their copies."""
        for weight, copy in self.copies.items():
            self._move(weight, copy)

    def _move(self, weight: Tensor, copy: Tensor) -> None:
        rows = self._sharding.local(copy.detach())
        if rows.numel():
            self._sharding.local(weight.detach()).copy_(on_grid(rows, self._settings.bits, self._settings.group))

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies by the names of their weights."""
        return {name: self.copies[w].detach() for name, w in self._chosen.items() if w in self.copies}


def _chosen(parameters: Mapping[str, nn.Parameter], settings: FakeQuantSection) -> Iterator[tuple[str, nn.Parameter]]:
    where, group = "trainer.fake_quant.weights", settings.group
    for pattern in settings.weights:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            msg = f"{where}: {pattern!r} matches no weight of the model; it has {_some(parameters)}"
            raise ConfigError(msg)
    for name, weight in parameters.items():
        if not any(fnmatchcase(name, pattern) for pattern in settings.weights):
            continue
        if weight.dim() < 2 or weight.shape[-1] % group:  # noqa: PLR2004 a matrix
            msg = (
                f"{where}: {name} has the shape {tuple(weight.shape)}, and groups of {group} do not divide its inputs; "
                "set trainer.fake_quant.group, or other patterns"
            )
            raise ConfigError(msg)
        yield name, weight


def _some(names: Iterable[str]) -> str:
    return f"{sorted(names)[:8]} ..."
