"""How the ranks of a trainer share a model, and which layouts cannot work: told before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from relax_actors.config.training import MegatronSection
from relax_actors.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the groups; `ranks = data x tensor x pipeline x context`, and ranks differ in tensor fastest."""

    ranks: int
    tensor: int
    pipeline: int
    virtual: int
    context: int
    expert: int
    expert_tensor: int
    sequence: bool

    @classmethod
    def of(cls, section: MegatronSection) -> Layout:
        """The layout of a configuration; see `check` for what cannot work."""
        return cls(
            ranks=section.ranks,
            tensor=section.tensor_parallel,
            pipeline=section.pipeline_parallel,
            virtual=section.virtual_pipeline,
            context=section.context_parallel,
            expert=section.expert_parallel,
            expert_tensor=section.expert_tensor_parallel or section.tensor_parallel,
            sequence=section.sequence_parallel,
        )

    @property
    def data(self) -> int:
        """Ranks that train different samples of a step."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    def groups(self) -> dict[str, int]:
        """Sizes of the groups by the names of their kinds of parallelism."""
        return {
            "data": self.data,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "context": self.context,
            "expert": self.expert,
        }

    @property
    def multiple(self) -> int:
        """What the length of a micro-batch must be a multiple of."""
        return (2 * self.context if self.context > 1 else 1) * (self.tensor if self.sequence else 1)


def check(layout: Layout, model: Mapping[str, Any]) -> None:
    """Refuse a layout that cannot train a model.

    Args:
        layout: of the trainer.
        model: its config.json.

    Raises:
        ConfigError: one line a reason.
    """
    experts = int(model.get("num_experts") or model.get("num_local_experts") or 0)
    found = [*_groups(layout), *_dense(layout, model), *_experts(layout, model, experts)]
    if found:
        raise ConfigError("\n".join(f"trainer.megatron: {text}" for text in found))


def _groups(layout: Layout) -> Iterator[str]:
    ranks, inner = layout.ranks, layout.tensor * layout.pipeline * layout.context
    if ranks % inner:
        yield (
            f"ranks = {ranks} is no multiple of tensor_parallel x pipeline_parallel x context_parallel = {inner}; "
            f"set ranks = {inner} or a multiple"
        )
    if layout.virtual > 1 and layout.pipeline == 1:
        yield f"virtual_pipeline = {layout.virtual} cuts the stages of a pipeline, and pipeline_parallel is 1"
    if layout.sequence and layout.tensor == 1:
        yield "sequence_parallel shares the sequence between the ranks of tensor_parallel, which is 1; leave it out"


def _dense(layout: Layout, model: Mapping[str, Any]) -> Iterator[str]:
    heads = int(model["num_attention_heads"])
    shared = {
        "num_attention_heads": heads,
        "num_key_value_heads": int(model.get("num_key_value_heads") or heads),
        "intermediate_size": int(model["intermediate_size"]),
    }
    for name, size in shared.items():
        if size % layout.tensor:
            yield f"tensor_parallel = {layout.tensor} does not divide the model's {name} = {size}"
    layers, stages = int(model["num_hidden_layers"]), layout.pipeline * layout.virtual
    if layers % stages:
        yield (
            f"pipeline_parallel x virtual_pipeline = {stages} does not divide the model's num_hidden_layers = {layers}"
        )


def _experts(layout: Layout, model: Mapping[str, Any], experts: int) -> Iterator[str]:
    if not experts:
        if layout.expert > 1:
            yield f"expert_parallel = {layout.expert}, but the model has no experts"
        if layout.expert_tensor != layout.tensor:
            yield f"expert_tensor_parallel = {layout.expert_tensor}, but the model has no experts; leave it out"
        return
    inner = layout.expert * layout.expert_tensor * layout.pipeline
    if layout.ranks % inner:
        yield (
            f"ranks = {layout.ranks} is no multiple of expert_parallel x expert_tensor_parallel x pipeline_parallel = "
            f"{inner}; set ranks = {inner} or a multiple"
        )
    if experts % layout.expert:
        yield f"expert_parallel = {layout.expert} does not divide the model's num_experts = {experts}"
    width = int(model.get("moe_intermediate_size") or model["intermediate_size"])
    if width % layout.expert_tensor:
        yield f"expert_tensor_parallel = {layout.expert_tensor} does not divide moe_intermediate_size = {width}"
    if layout.tensor > 1 and not layout.sequence:
        yield (
            f"a model with experts and tensor_parallel = {layout.tensor} needs sequence_parallel = true: without it "
            "every rank would route all tokens"
        )
    if layout.expert == 1 and layout.expert_tensor != layout.tensor:
        yield (
            f"expert_tensor_parallel = {layout.expert_tensor} with tensor_parallel = {layout.tensor} and "
            "expert_parallel = 1 trains wrong weights without a sign of it: megatron-core does not add up the "
            "gradients of the experts over the tensor ranks; leave it out, or set expert_parallel"
        )
