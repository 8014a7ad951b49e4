"""AdamW of megatron-core: gradients in float32, state sharded over data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from relax_actors.config.schema import Config
from relax_actors.engines.megatron.mcore.model_chunks import ModelChunks
from relax_actors.engines.megatron.mcore.process_groups import plain_object_gathering
from relax_actors.engines.torch.host_memory import MovableStorages, Tensors
from relax_actors.engines.torch.loss_scale import LossScale


@dataclass(frozen=True, slots=True)
class Slot:
    """What the optimizer keeps of a parameter on this rank.

    Attributes:
        parameter: of the model.
        span: part of the flattened parameter.
        main: weights that the optimizer updates.
        state: tensors of the optimizer by name; empty before the first step.
        is_shared_out: whether the data-parallel ranks have other parts of it, instead of the same.
    """

    parameter: torch.Tensor
    span: range
    main: torch.Tensor
    state: dict[str, Any]
    is_shared_out: bool


class Optimizer:
    """Optimizer of one model.

    Args:
        config: configuration of the run.
        chunks: model chunks of this rank. Train through `models`, which wrap them and sum gradients over ranks.

    Attributes:
        updates: number of steps taken since `reset`, without those that were skipped.
    """

    def __init__(self, config: Config, chunks: ModelChunks) -> None:
        settings = config.trainer
        if chunks.towers is not None:
            chunks.towers.share_frozen()
        sharded = settings.megatron.distributed_optimizer
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
        self.models: Sequence[Any] = [DistributedDataParallel(chunks.config, ddp, model) for model in chunks.wrapped]
        with plain_object_gathering():
            self.inner: Any = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=settings.learning_rate,
                    adam_beta1=settings.betas[0],
                    adam_beta2=settings.betas[1],
                    adam_eps=settings.epsilon,
                    weight_decay=settings.weight_decay,
                    clip_grad=settings.max_grad_norm,
                    use_distributed_optimizer=sharded,
                    params_dtype=chunks.config.params_dtype,
                    bf16=chunks.config.bf16,
                    fp16=chunks.config.fp16,
                    # megatron-core only says whether gradients overflowed: the loss is scaled as in the torch engine.
                    loss_scale=1.0 if chunks.config.fp16 else None,
                ),
                self.models,
                config_overrides={},  # one learning rate and weight decay for all parameters, as in the torch engine
            )
        self._towers = chunks.towers
        # A step may take several calls of the schedule; `step` sums their gradients over ranks once.
        chunks.config.finalize_model_grads_func = None
        self._settings, self.loss_scale, self.updates = settings, LossScale.of(settings), 0
        chunks.config.grad_scale_func = self._scaled

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return self.loss_scale.scaled(loss)

    def reset(self) -> None:
        """Clear the optimizer state and copy the models' current weights."""
        self.loss_scale, self.updates = LossScale.of(self._settings), 0
        for part in self.parts:
            part.optimizer.state.clear()
        self.inner.reload_model_params()
        self.invalidate()

    def invalidate(self) -> None:
        """Have copies of weights on other ranks follow; call it when the weights have changed but for a step."""
        if self._towers is not None:
            self._towers.invalidate()

    @property
    def parts(self) -> Sequence[Any]:
        """The chained optimizers: one, or one for dense parameters and one for experts."""
        parts: Sequence[Any] = getattr(self.inner, "chained_optimizers", [self.inner])
        return parts

    def zero_grad(self) -> None:
        """Set all gradients to 0."""
        for model in self.models:
            model.zero_grad_buffer()
        if self._towers is not None:
            self._towers.zero_grad()
        self.inner.zero_grad()

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield the memory of the models' gradients."""
        for model in self.models:
            yield from (buffer.grad_data for buffer in (*model.buffers, *model.expert_parallel_buffers))

    def sum_gradients(self) -> None:
        """Sum the gradients over ranks, in place; collective."""
        if self._towers is not None:
            self._towers.sum_gradients()
        finalize_model_grads(self.models)

    @property
    def gradients_are_whole(self) -> bool:
        """Whether gradients have all of a micro-batch after its backward pass; not with towers that stages share."""
        return self._towers is None or not self._towers.spans_stages

    def step(self, rate: float, factor: float, measured: Mapping[str, float]) -> dict[str, float]:
        """Sum the gradients over ranks, multiply and clip them, and take a step, unless the loss scale was too large.

        Args:
            rate: learning rate.
            factor: multiplied with the gradients.
            measured: measurements of the forward passes.

        Returns:
            Metrics of the update; `grad_norm` is the norm before clipping.

        Raises:
            FloatingPointError: the norm is not finite, for another reason.
        """
        self.sum_gradients()
        if (scale := factor / self.loss_scale.value) != 1.0:
            for model in self.models:
                model.scale_gradients(scale)
        for group in self.inner.param_groups:
            group["lr"] = rate
        _, norm, _ = self.inner.step()
        if self._towers is not None:
            self._towers.end_step()
        found = self.loss_scale.metrics_of(math.inf if norm is None else float(norm), measured.values())
        self.updates += "grad_norm" in found
        return found

    def rate(self) -> float:
        """Current learning rate."""
        return float(next(group["lr"] for group in self.inner.param_groups))

    @torch.no_grad()
    def values(self) -> list[torch.Tensor]:
        """Tensors of the optimizer state."""
        return [value for part in self.parts for state in part.optimizer.state.values() for value in state.values()]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield gradients of the models, and the optimizer's weights, their gradients and state, shared ones twice.

        Copies of towers on later pipeline stages are among them.
        """
        yield from self.buffers()
        for weight in (p for part in self.parts for group in part.optimizer.param_groups for p in group["params"]):
            # Without copies in float32 the optimizer updates views of the models, whose gradients are views, too.
            yield from (weight, weight.grad) if weight.is_leaf and weight.grad is not None else (weight,)
        yield from (value for value in self.values() if isinstance(value, torch.Tensor))
        yield from () if self._towers is None else self._towers.copies()

    def slots(self) -> Iterator[Slot]:
        """State of each parameter that is trained."""
        for part in self.parts:
            if isinstance(part, DistributedOptimizer):
                for parameter, (group, index) in part.model_param_group_index_map.items():
                    own = part._get_model_param_range_map(parameter)["param"]  # noqa: SLF001 there is no public way
                    main = part.optimizer.param_groups[group]["params"][index]
                    state = part.optimizer.state[main]
                    yield Slot(parameter, range(own.start, own.end), main, state, is_shared_out=True)
                continue
            halves = zip(
                *(getattr(part, name, []) for name in ("fp32_from_float16_groups", "float16_groups")), strict=True
            )
            parameters = {
                id(main): model for mains, models in halves for main, model in zip(mains, models, strict=True)
            }
            for main in (main for group in part.optimizer.param_groups for main in group["params"]):
                parameter, state = parameters.get(id(main), main), part.optimizer.state[main]
                yield Slot(parameter, range(main.numel()), main, state, is_shared_out=False)

    @property
    def group_step(self) -> int | None:
        """Step that fused optimizers count for all parameters together; None if each has a count of its own."""
        counts = [group["step"] for part in self.parts for group in part.optimizer.param_groups if "step" in group]
        return int(counts[0]) if counts else None

    @group_step.setter
    def group_step(self, step: int | None) -> None:
        for group in (group for part in self.parts for group in part.optimizer.param_groups):
            group.pop("step", None)
            if step is not None:
                group["step"] = step


def movable(chunks: ModelChunks, optimizer: Optimizer, beside: Tensors = tuple) -> MovableStorages:
    """Return what moves a rank's memory off its device.

    Args:
        chunks: model chunks in training.
        optimizer: their optimizer.
        beside: returns further tensors that are read while the memory is away.
    """

    def readable() -> list[torch.Tensor]:
        return [*(p for model in chunks.bare for p in model.parameters()), *beside()]

    return MovableStorages(readable, optimizer.tensors)
