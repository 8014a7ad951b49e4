"""Record and replay the experts that the routers of a torch model choose (router replay, R3).

The weights of replayed experts are computed from the current logits of the router, so the gradient reaches the router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from relax_actors.errors import ConfigError
from relax_actors.messages.experts import MISSING

Weigh = Callable[[Tensor, Tensor], Tensor]
"""Weights of chosen experts from the logits of all `[tokens, experts]` and the choice `[tokens, experts_per_token]`."""
REROUTED, ROUTED = "rerouted", "routed"
"""Metrics: recorded choices that differ from the router's own choice, and all recorded choices."""


class RerouteCounter:
    """Counts recorded choices that differ from the router's own choice; one choice is one token in one layer."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    def replace(self, own: Tensor, recorded: Tensor) -> Tensor:
        """Return the recorded experts where known, else the router's own, and count the differences.

        Args:
            own: `[tokens, experts_per_token] int64`.
            recorded: `[tokens, experts_per_token] int64`, rows of -1 where nothing was recorded.
        """
        self.count(own, recorded)
        return torch.where(recorded[:, :1] >= 0, recorded, own)

    def count(self, own: Tensor, recorded: Tensor) -> None:
        """Count choices; both arguments are `[..., experts_per_token] int64`. The order of the experts is ignored."""
        known = recorded[..., 0] >= 0
        rerouted = (own.sort(-1).values != recorded.sort(-1).values).any(-1) & known
        counts = torch.stack([rerouted.sum(), known.sum()])
        self._counts = counts if self._counts is None else self._counts + counts

    def take(self) -> dict[str, float]:
        """Return the counts since the last call, and reset them."""
        counts, self._counts = self._counts, None
        rerouted, known = counts.tolist() if counts is not None else (0, 0)
        return {REROUTED: float(rerouted), ROUTED: float(known)}


class Routers:
    """Routers of a transformers model, in the order of its layers.

    Transformers names the routers of a model, whose output is (logits, weights of the chosen experts, chosen experts).
    A trial determines how it computes weights from logits.

    Raises:
        ConfigError: the model has no router, or one that makes its weights in an unknown way.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules = list(_routers_of(model))
        if not modules:
            msg = (
                f"trainer.router_replay: transformers names no router in the model {model.config.model_type}; "
                "leave the setting out"
            )
            raise ConfigError(msg)
        weigh = _rule_of(modules[0])
        self.reroutes = RerouteCounter()
        self._recorded: list[Tensor] | None = None
        # Experts to choose `[layers, tokens, experts_per_token]`, and where they are known `[layers, tokens, 1]`.
        self._replayed: tuple[Tensor, Tensor] | None = None
        for layer, module in enumerate(modules):
            module.register_forward_hook(partial(self._after_router, layer, weigh))

    def _after_router(
        self, layer: int, weigh: Weigh, _: nn.Module, __: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> Any:
        logits, weights, own = output
        if self._recorded is not None:
            self._recorded.append(own)
        if self._replayed is None:
            return None
        recorded, known = self._replayed
        chosen = torch.where(known[layer], recorded[layer], own)
        return logits, weigh(logits, chosen).to(weights.dtype), chosen

    @contextmanager
    def recording(self, into: list[Tensor]) -> Iterator[None]:
        """Append the chosen experts of each layer to `into`, in order: `[tokens, experts_per_token] int64`."""
        self._recorded = into
        try:
            yield
        finally:
            self._recorded = None

    @contextmanager
    def replaying(self, recorded: Tensor, *, only_count: bool = False) -> Iterator[None]:
        """Make the routers choose recorded experts during one forward pass, and count the differences.

        Args:
            recorded: `[layers, tokens, experts_per_token] int64`, -1 for the router's own choice.
            only_count: let the routers make their own choice, and only count.
        """
        self._replayed = None if only_count else (recorded, recorded[..., :1] >= 0)
        own: list[Tensor] = []
        try:
            with self.recording(own):
                yield
            # Counted for all layers at once: on small models each extra operation in a hook is measurable.
            self.reroutes.count(torch.stack(own), recorded)
        finally:
            self._replayed = None

    def contexts_of_recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the context of a layer's pass, and that of its recomputation in backward.

        The recomputation replays the experts of the pass. Its choices are neither recorded nor counted.
        """
        return nullcontext(), self._replaying_again(self._replayed)

    @contextmanager
    def _replaying_again(self, replayed: tuple[Tensor, Tensor] | None) -> Iterator[None]:
        self._replayed = replayed
        try:
            yield
        finally:
            self._replayed = None


def _routers_of(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules whose logits transformers reports as `router_logits`."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    named = [part.can_record_outputs["router_logits"] for part in parts if "router_logits" in part.can_record_outputs]
    kinds = {getattr(recorder, "target_class", recorder) for recorder in named}
    return (module for module in model.modules() if type(module) in kinds)


def _softmax_of_chosen(logits: Tensor, chosen: Tensor) -> Tensor:
    """Return a softmax over the chosen experts, which equals the normalised softmax over all."""
    return logits.gather(1, chosen).softmax(-1, dtype=torch.float32)


def _softmax(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=torch.float32).gather(1, chosen)


def _sigmoid(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.float().sigmoid().gather(1, chosen)


def _normalised_sigmoid(logits: Tensor, chosen: Tensor) -> Tensor:
    scores = _sigmoid(logits, chosen)
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _scaled(rule: Weigh, scale: float, logits: Tensor, chosen: Tensor) -> Tensor:
    weights = rule(logits, chosen)
    return weights if scale == 1 else weights * scale


@torch.no_grad()
def _rule_of(router: nn.Module) -> Weigh:
    """Find out, by a trial, how a router weighs chosen experts; raises ConfigError if in no known way."""
    source, state = torch.Generator().manual_seed(0), {}
    for name, tensor in (*router.named_parameters(), *router.named_buffers()):
        drawn = torch.randn(tensor.shape, generator=source) / tensor.shape[-1] ** 0.5
        state[name] = drawn.to(tensor.device)
    hidden = torch.randn(8, state["weight"].shape[-1], generator=source).to(state["weight"].device)
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    # A router may return something else than logits, weights and indices.
    with suppress(ValueError, TypeError, RuntimeError, IndexError):
        logits, weights, chosen = functional_call(router, state, (hidden,))
        for rule in (_softmax_of_chosen, _softmax, _normalised_sigmoid, _sigmoid):
            if torch.allclose(rule(logits, chosen) * scale, weights.float(), rtol=1e-4, atol=1e-6):
                return partial(_scaled, rule, scale)
    msg = (
        f"trainer.router_replay: {type(router).__name__} weighs the chosen experts in an unknown way; leave the "
        "setting out, or add its rule to relax_actors/engines/torch/experts.py"
    )
    raise ConfigError(msg)


def pack_experts(recorded: Sequence[NDArray[Any]], paths: Sequence[NDArray[Any]], total: int) -> NDArray[Any]:
    """Lay out the recorded experts of sequences like the tokens of a micro-batch.

    Args:
        recorded: `[len - 1, layers, experts_per_token]` of each sequence.
        paths: `[inputs] int64` of each sequence, index of its tokens among `total`. Tokens without recorded experts
            get -1.
        total: tokens of the micro-batch.

    Returns:
        `[layers, total, experts_per_token] int64`.
    """
    out = np.full((total, *recorded[0].shape[1:]), MISSING, np.int64)
    for chosen, path in zip(recorded, paths, strict=True):
        known = min(len(chosen), len(path))
        out[path[:known]] = chosen[:known]
    return np.ascontiguousarray(out.swapaxes(0, 1))
