"""The experts that a rollout recorded, in the places of those that the routers of this rank would choose (R3).

megatron-core has a replay of its own, whose state is one list a process for all models in it, and which ends where no
expert was recorded; here each router has its own object, which megatron-core asks in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from relax_actors.engines.torch.experts import Choices
from relax_actors.errors import ConfigError

TopK = Callable[..., tuple[Tensor, Tensor]]


class _Router:
    """What one router asks for its experts.

    Where activations are computed again in backward, the router is asked twice a micro-batch: in forward, which then
    keeps no gradient, and again with it. Backward takes a stage's micro-batches in the order of forward.
    """

    def __init__(self, choices: Choices, *, recomputed: bool) -> None:
        self._choices, self._recomputed = choices, recomputed
        self.recorded: Tensor | None = None
        self.uses = self.trains = True
        self._later: deque[Tensor | None] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers of the experts, `[tokens, topk]` each; called by megatron-core with its own top-k."""
        if default_compute_topk is None:
            msg = "megatron-core's router has not said how it chooses; its version is not the one that is supported"
            raise TypeError(msg)
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        recorded, again = self.recorded, False
        if self._recomputed and self.trains:
            if torch.is_grad_enabled():
                recorded, again = self._later.popleft(), True
            else:
                self._later.append(recorded)
        if recorded is None:
            return values, own
        chosen = (Choices() if again else self._choices).replace(own, recorded)
        return (scores.gather(1, chosen), chosen) if self.uses else (values, own)

    def clear(self) -> None:
        """Forget a step that was broken off."""
        self.recorded = None
        self._later.clear()


class Replay:
    """The routers of this rank's stages.

    Args:
        models: the stages.
        recomputed: whether all activations are computed again in backward.
        sequence: whether the ranks of tensor parallelism share the sequence.

    Raises:
        ConfigError: the model has no experts.
    """

    def __init__(self, models: Sequence[Any], *, recomputed: bool, sequence: bool) -> None:
        if not all(hasattr(layer.mlp, "router") for model in models for layer in _layers(model)):
            msg = "trainer.router_replay = true, but the model has no experts; leave it out"
            raise ConfigError(msg)
        self.choices = Choices()
        self._sequence = sequence
        self._routers: list[dict[int, _Router]] = []
        for model in models:
            routers = {layer.layer_number - 1: _Router(self.choices, recomputed=recomputed) for layer in _layers(model)}
            for layer in _layers(model):
                layer.mlp.router.router_replay = routers[layer.layer_number - 1]
            self._routers.append(routers)

    def begin(self, *, uses: bool, trains: bool) -> None:
        """Begin to pass micro-batches through.

        Args:
            uses: whether the recorded experts are used, or only compared with the routers' own.
            trains: whether backward follows.
        """
        for routers in self._routers:
            for router in routers.values():
                router.clear()
                router.uses, router.trains = uses, trains

    def set(self, stage: int, recorded: Tensor | None) -> None:
        """The experts of the micro-batch that comes next through a stage.

        Args:
            stage: of this rank's.
            recorded: of the positions that this rank of context parallelism has, `[rows, seq, layers,
                experts_of_token] int64`, -1 for the router's own.
        """
        by_layer = None if recorded is None else self._as_routers_have_them(recorded)
        for layer, router in self._routers[stage].items():
            router.recorded = None if by_layer is None else by_layer[layer]

    def _as_routers_have_them(self, recorded: Tensor) -> Tensor:
        """`[layers, tokens, experts_of_token]`: tokens in the order of position first, and of these this rank's."""
        ordered = recorded.transpose(0, 1)
        if self._sequence:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            ordered = ordered.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return ordered.flatten(0, 1).transpose(0, 1).contiguous()


def _layers(model: Any) -> Any:
    """The layers of a stage; each knows its number in the whole model, from 1."""
    return model.decoder.layers
