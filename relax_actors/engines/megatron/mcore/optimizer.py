"""AdamW of megatron-core over the stages of a rank: gradients in float32, state shared between ranks of data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from relax_actors.config.schema import Config
from relax_actors.engines.megatron.mcore.transformer import Chunks


class Optimizer:
    """The optimizer of one model.

    Args:
        config: the run's.
        chunks: the stages of this rank; they are trained through `models`, which add gradients up over ranks.
    """

    def __init__(self, config: Config, chunks: Chunks) -> None:
        settings = config.trainer
        shared = settings.megatron.distributed_optimizer
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=shared)
        self.models: Sequence[Any] = [DistributedDataParallel(chunks.config, ddp, model) for model in chunks.wrapped]
        self.inner: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.learning_rate,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.epsilon,
                weight_decay=settings.weight_decay,
                clip_grad=settings.max_grad_norm,
                use_distributed_optimizer=shared,
                params_dtype=chunks.config.params_dtype,
                bf16=chunks.config.bf16,
            ),
            self.models,
            config_overrides={},  # one rate and one decay for all parameters, as in torch
        )
        chunks.config.finalize_model_grads_func = self._finalize

    @staticmethod
    def _finalize(models: Sequence[Any], _: Any = None, **settings: Any) -> None:
        """Add gradients up over ranks. What the step's loss is divided by is in the loss already."""
        finalize_model_grads(models, None, **settings)

    def begin(self) -> None:
        """A fresh state, and the models' weights as they are now."""
        for part in self.parts:
            part.optimizer.state.clear()
        self.inner.reload_model_params()

    @property
    def parts(self) -> Sequence[Any]:
        """The optimizers of dense parameters and of experts, where these are apart."""
        parts: Sequence[Any] = getattr(self.inner, "chained_optimizers", [self.inner])
        return parts

    def clear(self) -> None:
        """Gradients are 0."""
        for model in self.models:
            model.zero_grad_buffer()
        self.inner.zero_grad()

    def step(self, rate: float, factor: float) -> float:
        """Multiply the gradients with a factor, clip, step; gives their norm before it was clipped."""
        if factor != 1.0:
            for model in self.models:
                model.scale_gradients(factor)
        for group in self.inner.param_groups:
            group["lr"] = rate
        _, norm, _ = self.inner.step()
        return float(norm)

    def rate(self) -> float:
        """The learning rate as it was last set."""
        return float(next(group["lr"] for group in self.inner.param_groups))

    @torch.no_grad()
    def values(self) -> list[torch.Tensor]:
        """The tensors of its state."""
        return [value for part in self.parts for state in part.optimizer.state.values() for value in state.values()]
