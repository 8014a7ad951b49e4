"""Router replay (R3): the routers of this rank use the experts that the rollout recorded.

megatron-core's own replay keeps one list of routers a process, shared by trained model and reference, and fails on
tokens without recorded experts. Here each router has its own object behind the same interface.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from relax_actors.engines.torch.experts import RerouteCounter
from relax_actors.errors import ConfigError

TopK = Callable[..., tuple[Tensor, Tensor]]


class _Router:
    """Replay of one router, called by megatron-core in place of its top-k.

    With full activation recomputation the router runs twice a micro-batch: in forward, without gradients, and again in
    backward. Backward takes the micro-batches of a chunk in the order of forward, so a queue keeps their experts.
    """

    def __init__(self, reroutes: RerouteCounter, *, recomputed: bool) -> None:
        self._reroutes, self._recomputed = reroutes, recomputed
        self.recorded: Tensor | None = None
        self.replays = self.trains = True
        self._awaiting_backward: deque[Tensor | None] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices of the experts, `[tokens, topk]` each, as in `RouterReplay`."""
        if default_compute_topk is None:
            msg = "megatron-core's router passed no top-k function; install the supported version of megatron-core"
            raise TypeError(msg)
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        recorded, is_recomputed = self.recorded, False
        if self._recomputed and self.trains:
            if torch.is_grad_enabled():
                recorded, is_recomputed = self._awaiting_backward.popleft(), True
            else:
                self._awaiting_backward.append(recorded)
        if recorded is None:
            return values, own
        chosen = (RerouteCounter() if is_recomputed else self._reroutes).replace(own, recorded)
        return (scores.gather(1, chosen), chosen) if self.replays else (values, own)

    def clear(self) -> None:
        """Discard the state of an interrupted step."""
        self.recorded = None
        self._awaiting_backward.clear()


class Replay:
    """Replay of all routers of this rank's model chunks.

    Backward recomputes all activations if `recomputed`; tensor-parallel ranks share the sequence if
    `sequence_parallel`.

    Raises:
        ConfigError: the model has no experts.
    """

    def __init__(self, models: Sequence[Any], *, recomputed: bool, sequence_parallel: bool) -> None:
        # Recorded experts are those of the layers that have some, in order.
        frequency = models[0].config.moe_layer_freq if models[0].config.num_moe_experts else [0]
        if not any(frequency):
            msg = "trainer.router_replay = true, but the model has no experts; leave it out"
            raise ConfigError(msg)
        self.reroutes = RerouteCounter()
        self._sequence_parallel = sequence_parallel
        self._routers: list[dict[int, _Router]] = []
        for model in models:
            routers = {}
            for layer in _layers_with_experts(model):
                number = sum(frequency[: layer.layer_number - 1])
                layer.mlp.router.router_replay = routers[number] = _Router(self.reroutes, recomputed=recomputed)
            self._routers.append(routers)

    def begin(self, *, replays: bool, trains: bool) -> None:
        """Prepare for the micro-batches of a pass, behind which a backward pass follows if `trains`.

        Unless it `replays`, recorded experts are only compared with the routers' own choice.
        """
        for routers in self._routers:
            for router in routers.values():
                router.clear()
                router.replays, router.trains = replays, trains

    def set(self, chunk: int, recorded: Tensor | None) -> None:
        """Set the experts of the next micro-batch of a model chunk.

        Args:
            chunk: number of the model chunk of this rank.
            recorded: experts at the positions of this context-parallel rank, `[rows, seq, layers, experts_per_token]
                int64`, -1 for the router's own choice; None if none were recorded.
        """
        by_layer = None if recorded is None else self._by_layer(recorded)
        for layer, router in self._routers[chunk].items():
            router.recorded = None if by_layer is None else by_layer[layer]

    def _by_layer(self, recorded: Tensor) -> Tensor:
        """This rank's part, `[layers, tokens, experts_per_token]`, by position, then row."""
        ordered = recorded.transpose(0, 1)
        if self._sequence_parallel:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            ordered = ordered.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return ordered.flatten(0, 1).transpose(0, 1).contiguous()


def _layers_with_experts(model: Any) -> list[Any]:
    """Layers of a model chunk that have experts; their `layer_number` counts from 1 in the whole model."""
    return [layer for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
