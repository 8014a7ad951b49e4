"""Routers of a torch model: the experts that they chose are recorded, or others are put in their place (R3).

Weights of the replayed experts come from the router's logits as they are now, so the gradient still reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from relax_actors.errors import ConfigError
from relax_actors.messages.experts import MISSING

ROUTERS = ("Qwen3MoeTopKRouter",)
"""transformers' routers that give (logits, weights of the chosen, chosen)."""
REROUTED, ROUTED = "rerouted", "routed"
"""Figures: recorded choices of a token in a layer that are others than the router's own; and all recorded ones."""


class Choices:
    """Counts how many of a router's own choices differ from the recorded ones that are put in their place."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    def replace(self, own: Tensor, recorded: Tensor) -> Tensor:
        """The recorded experts where there are some, else the router's own.

        Args:
            own: `[tokens, experts_of_token] int64`.
            recorded: the same shape and type, rows of -1 where nothing was recorded.
        """
        self.count(own, recorded)
        return torch.where(recorded[:, :1] >= 0, recorded, own)

    def count(self, own: Tensor, recorded: Tensor) -> None:
        """Count choices, `[..., experts_of_token] int64` both."""
        known = recorded[..., 0] >= 0
        others = (own.sort(-1).values != recorded.sort(-1).values).any(-1) & known
        counts = torch.stack([others.sum(), known.sum()])
        self._counts = counts if self._counts is None else self._counts + counts

    def take(self) -> dict[str, float]:
        """The counts since the last time."""
        counts, self._counts = self._counts, None
        others, known = counts.tolist() if counts is not None else (0, 0)
        return {REROUTED: float(others), ROUTED: float(known)}


class Routers:
    """The routers of a Hugging Face model, in the order of its layers.

    Args:
        model: with experts.

    Raises:
        ConfigError: it has no router that is known.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules = [module for module in model.modules() if type(module).__name__ in ROUTERS]
        if not modules:
            kind = model.config.model_type
            msg = f"trainer.router_replay: transformers' {kind} has no router that is known here ({', '.join(ROUTERS)})"
            raise ConfigError(msg)
        self.choices = Choices()
        self._recorded: list[Tensor] | None = None
        # What is chosen in place of their own, and where: `[layers, tokens, experts_of_token]`, `[layers, tokens, 1]`.
        self._replayed: tuple[Tensor, Tensor] | None = None
        for layer, module in enumerate(modules):
            module.register_forward_hook(partial(self._chosen, layer))

    def _chosen(self, layer: int, router: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, own = output
        if self._recorded is not None:
            self._recorded.append(own)
        if self._replayed is None:
            return None
        recorded, known = self._replayed
        chosen = torch.where(known[layer], recorded[layer], own)
        if router.norm_topk_prob:  # a softmax over the chosen is that over all, renormalised
            found = logits.gather(1, chosen).softmax(-1, dtype=torch.float32)
        else:
            found = logits.softmax(-1, dtype=torch.float32).gather(1, chosen)
        return logits, found.to(weights.dtype), chosen

    @contextmanager
    def recording(self, into: list[Tensor]) -> Iterator[None]:
        """Append what is chosen within: `[tokens, experts_of_token] int64` a layer, in order."""
        self._recorded = into
        try:
            yield
        finally:
            self._recorded = None

    @contextmanager
    def replaying(self, recorded: Tensor, *, only_count: bool = False) -> Iterator[None]:
        """Have the routers choose what was recorded, `[layers, tokens, experts_of_token] int64`, -1 for their own.

        Args:
            recorded: of the tokens of the one forward pass within.
            only_count: leave the routers their own choice.
        """
        self._replayed = None if only_count else (recorded, recorded[..., :1] >= 0)
        own: list[Tensor] = []
        try:
            with self.recording(own):
                yield
            # All layers at once: on small models each operation in a hook is felt.
            self.choices.count(torch.stack(own), recorded)
        finally:
            self._replayed = None


def laid_out(recorded: Sequence[NDArray[Any]], places: Sequence[slice], total: int) -> NDArray[Any]:
    """Recorded experts of sequences as a micro-batch has their tokens, `[layers, total, experts_of_token] int64`.

    Args:
        recorded: each `[len - 1, layers, experts_of_token]`.
        places: of each sequence's tokens among `total`; the last of these, and what is between them, gets -1.
        total: tokens of the micro-batch.
    """
    out = np.full((total, *recorded[0].shape[1:]), MISSING, np.int64)
    for chosen, place in zip(recorded, places, strict=True):
        out[place.start : place.start + len(chosen)] = chosen
    return np.ascontiguousarray(out.swapaxes(0, 1))
