"""Parallel layout of ranks, and checks that refuse impossible layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from relax_actors.config.media import is_nested
from relax_actors.config.training import MegatronSection
from relax_actors.data.model_folder import expert_count
from relax_actors.engines.megatron.architecture import decoder_fields, deepstack_indexes
from relax_actors.errors import ConfigError

GROUPED_MULTIPLE = 8
"""Numbers of which the rows of an expert's matrices are multiples for `grouped_mm`: 16 bytes in half precision."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel groups: `ranks = data x tensor x pipeline x context`.

    The tensor-parallel rank varies fastest.
    """

    ranks: int
    tensor: int
    pipeline: int
    virtual: int
    context: int
    expert: int
    expert_tensor: int
    sequence: bool
    first_layers: int | None = None
    last_layers: int | None = None
    shares_towers: bool = True
    grouped_experts: bool | Literal["auto"] = field(default="auto", compare=False)
    """See `MegatronSection`; models of one process may differ in it."""

    @classmethod
    def of(cls, section: MegatronSection) -> Layout:
        """Layout of a configuration, unchecked; see `check`."""
        return cls(
            ranks=section.ranks,
            tensor=section.tensor_parallel,
            pipeline=section.pipeline_parallel,
            virtual=section.virtual_pipeline,
            context=section.context_parallel,
            expert=section.expert_parallel,
            expert_tensor=section.expert_tensor_parallel or section.tensor_parallel,
            sequence=section.sequence_parallel,
            first_layers=section.first_stage_layers,
            last_layers=section.last_stage_layers,
            shares_towers=section.share_towers,
            grouped_experts=section.grouped_experts,
        )

    @property
    def data(self) -> int:
        """Data-parallel size: ranks that train different sequences of a step."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def streams(self) -> bool:
        """Whether a step may be computed in several calls.

        Each call fills and drains the pipeline of stages, which costs more than an early start gains.
        """
        return self.pipeline == 1

    def groups(self) -> dict[str, int]:
        """Group sizes by kind of parallelism."""
        return {
            "data": self.data,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "context": self.context,
            "expert": self.expert,
        }

    def stage_layers(self, layers: int) -> list[int] | None:
        """Layers of each stage; None if the stages in the middle cannot have equally many, or one has none."""
        first, last = self.first_layers, self.last_layers
        if self.pipeline == 1:
            return [layers] if first is last is None else None
        others = self.pipeline * self.virtual - (first is not None) - (last is not None)
        left = layers - (first or 0) - (last or 0)
        share = left // others if others else 0
        if share * others != left or (others and not share):
            return None
        ends = [[] if size is None else [size] for size in (first, last)]
        return [*ends[0], *[share] * others, *ends[1]]

    @property
    def length_multiple(self) -> int:
        """Number that the length of every micro-batch must be a multiple of."""
        return (2 * self.context if self.context > 1 else 1) * (self.tensor if self.sequence else 1)


def check(layout: Layout, model: Mapping[str, Any], section: str = "trainer.megatron") -> None:
    """Refuse a layout that cannot train a model.

    Args:
        layout: of the ranks.
        model: fields of the model's config.json.
        section: configuration section of the layout, for errors.

    Raises:
        ConfigError: lists every problem, one a line.
    """
    experts = expert_count(model)
    problems = [
        *_group_problems(layout),
        *_dense_problems(layout, model),
        *_expert_problems(layout, model, experts),
        *_grouped_problems(layout, model, experts),
    ]
    if problems:
        raise ConfigError(*(f"{section}: {text}" for text in problems))


def _grouped_problems(layout: Layout, model: Mapping[str, Any], experts: int) -> Iterator[str]:
    if layout.grouped_experts is not True:
        return
    if not experts:
        yield "grouped_experts = true, but the model has no experts; leave it out"
        return
    sizes = int(model["hidden_size"]), expert_width(model) // layout.expert_tensor
    if any(size % GROUPED_MULTIPLE for size in sizes):
        yield (
            f"grouped_experts = true needs a hidden_size and a moe_intermediate_size of a rank that are multiples of "
            f"{GROUPED_MULTIPLE}, they are {sizes[0]} and {sizes[1]}; leave it out"
        )


def expert_width(model: Mapping[str, Any]) -> int:
    """Return the intermediate size of an expert, from the fields of a config.json."""
    return int(model.get("moe_intermediate_size") or model["intermediate_size"])


def check_towers(layout: Layout, body: Mapping[str, Any], section: str = "trainer.megatron") -> None:
    """Refuse a layout that cannot train a multimodal model; see `check`.

    Args:
        layout: of the ranks.
        body: the model's config.json.
        section: configuration section of the layout, for errors.
    """
    if not is_nested(body):
        return
    layers, deepstack = decoder_fields(body).get("num_hidden_layers"), len(deepstack_indexes(body))
    stages = None if layers is None else layout.stage_layers(int(layers))
    if stages is not None and deepstack > stages[0]:
        msg = (
            f"{section}: the towers of the model add features to its first {deepstack} layers "
            f"(deepstack_visual_indexes), and the first of {len(stages)} pipeline stages, which holds the towers, has "
            f"{stages[0]} of {layers} layers; set first_stage_layers, or lower pipeline_parallel or virtual_pipeline"
        )
        raise ConfigError(msg)


def _group_problems(layout: Layout) -> Iterator[str]:
    ranks, model_parallel = layout.ranks, layout.tensor * layout.pipeline * layout.context
    if ranks % model_parallel:
        yield (
            f"ranks = {ranks} is not a multiple of tensor_parallel x pipeline_parallel x context_parallel = "
            f"{model_parallel}; set ranks to {model_parallel} or a multiple"
        )
    if layout.virtual > 1 and layout.pipeline == 1:
        yield f"virtual_pipeline = {layout.virtual} needs pipeline_parallel > 1, which is 1; leave it out"
    if layout.sequence and layout.tensor == 1:
        yield "sequence_parallel needs tensor_parallel > 1, which is 1; leave it out"


def _dense_problems(layout: Layout, model: Mapping[str, Any]) -> Iterator[str]:
    # The config.json of some multimodal models leaves out sizes that are the defaults of transformers.
    heads = model.get("num_attention_heads")
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": model.get("num_key_value_heads") or heads,
        "intermediate_size": model.get("intermediate_size"),
    }
    if model.get("kv_lora_rank"):
        sizes["q_lora_rank"] = model.get("q_lora_rank")
        sizes["kv_lora_rank + qk_rope_head_dim"] = model["kv_lora_rank"] + model.get("qk_rope_head_dim", 0)
    for name, size in sizes.items():
        if size is not None and int(size) % layout.tensor:
            yield f"tensor_parallel = {layout.tensor} does not divide the model's {name} = {size}; lower it"
    layers, ends = model.get("num_hidden_layers"), {"first": layout.first_layers, "last": layout.last_layers}
    uneven = " and ".join(f"{end}_stage_layers = {size}" for end, size in ends.items() if size is not None)
    if uneven and (layout.pipeline == 1 or layout.virtual > 1):
        yield (
            f"{uneven} needs pipeline_parallel > 1, which is {layout.pipeline}, and virtual_pipeline = 1, which is "
            f"{layout.virtual}; leave it out"
        )
    elif layers is not None and layout.stage_layers(int(layers)) is None:
        yield (
            f"with {uneven}, the others of {layout.pipeline} stages have no equal shares of the model's "
            f"num_hidden_layers = {layers}; choose other numbers"
            if uneven
            else f"pipeline_parallel x virtual_pipeline = {layout.pipeline * layout.virtual} does not divide the "
            f"model's num_hidden_layers = {layers}; lower one of them, or set first_stage_layers or last_stage_layers"
        )


def _expert_problems(layout: Layout, model: Mapping[str, Any], experts: int) -> Iterator[str]:
    if not experts:
        if layout.expert > 1:
            yield f"expert_parallel = {layout.expert}, but the model has no experts; leave it out"
        if layout.expert_tensor != layout.tensor:
            yield f"expert_tensor_parallel = {layout.expert_tensor}, but the model has no experts; leave it out"
        return
    expert_group = layout.expert * layout.expert_tensor * layout.pipeline
    if layout.ranks % expert_group:
        yield (
            f"ranks = {layout.ranks} is not a multiple of expert_parallel x expert_tensor_parallel x "
            f"pipeline_parallel = {expert_group}; set ranks to {expert_group} or a multiple"
        )
    if experts % layout.expert:
        yield f"expert_parallel = {layout.expert} does not divide the model's num_experts = {experts}; lower it"
    width = expert_width(model)
    if width % layout.expert_tensor:
        yield (
            f"expert_tensor_parallel = {layout.expert_tensor} does not divide moe_intermediate_size = {width}; lower it"
        )
    if layout.tensor > 1 and not layout.sequence:
        yield (
            f"with tensor_parallel = {layout.tensor} alone, every rank of a model with experts would route all tokens; "
            "set sequence_parallel = true"
        )
    if layout.expert == 1 and layout.expert_tensor != layout.tensor:
        yield (
            f"expert_tensor_parallel = {layout.expert_tensor} with tensor_parallel = {layout.tensor} and "
            "expert_parallel = 1 silently trains wrong weights: megatron-core does not sum the gradients of the "
            "experts over the tensor-parallel ranks; leave it out, or set expert_parallel"
        )
