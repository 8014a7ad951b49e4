"""Model chunks of this rank: GPTModels built from an architecture and a parallel layout."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from relax_actors.config.schema import Config
from relax_actors.engines.megatron.conversion import VALUE_BIAS, VALUE_WEIGHT, Conversion, NumberHead
from relax_actors.engines.megatron.families import Architecture
from relax_actors.engines.megatron.folder_reader import stored_weights
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore import ON_CPU, layer_specs
from relax_actors.engines.megatron.mcore.frozen import freeze_padding
from relax_actors.engines.megatron.mcore.logprobs import return_hidden_states
from relax_actors.engines.megatron.mcore.media_model import MediaModel
from relax_actors.engines.megatron.mcore.process_groups import device
from relax_actors.engines.megatron.mcore.rotary import PackedRotaryEmbedding, softmax_scale
from relax_actors.engines.megatron.mcore.shared_towers import SharedTowers
from relax_actors.engines.megatron.mcore.value_head import ValueHead
from relax_actors.engines.megatron.tower_shares import Features
from relax_actors.engines.megatron.towers import build_towers, float32_buffers, tower_shapes
from relax_actors.engines.torch.score_model import drawn_head, model_maker
from relax_actors.media.family import family_of

TEXT_HEAD = {VALUE_WEIGHT: "score.weight", VALUE_BIAS: "score.bias"}
MEDIA_HEAD = {VALUE_WEIGHT: "lm_head.weight"}
"""Names of the head in the models of `engines.torch.model.build_critic`; a reward model's are those of `TEXT_HEAD`."""
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(config: Config, architecture: Architecture, layout: Layout) -> Any:
    """TransformerConfig of megatron-core for a run."""
    dtype = getattr(torch, config.trainer.precision)
    kind = TransformerConfig if architecture.latent is None else MLATransformerConfig
    return kind(
        **architecture.transformer_config_arguments(),
        activation_func=nn.functional.silu,
        softmax_scale=softmax_scale(architecture),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        num_layers_in_first_pipeline_stage=layout.first_layers,
        num_layers_in_last_pipeline_stage=layout.last_layers,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=layout.sequence,
        # Pipeline stages exchange the shapes of their activations. With virtual stages and two ranks these messages
        # would cross, as each rank is the other's next and previous; there all micro-batches have one shape.
        variable_seq_lengths=layout.pipeline > 1 and layout.virtual == 1,
        batch_p2p_comm=layout.virtual == 1,
        # Sum gradients over ranks instead of averaging: the loss is normalised by the whole step.
        calculate_per_token_loss=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=ON_CPU,
        # These need fused kernels of Apex or TransformerEngine, or compiled code.
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        **_RECOMPUTE[config.trainer.recompute],
    )


class ModelChunks:
    """Model chunks of this rank, one for each virtual pipeline stage.

    `bare` are the GPTModels; `wrapped` are the same in a Float16Module in half precision. The architecture is that of
    `folder`, by default the run's model; `head` is in place of the output layer. `towers` are those of a multimodal
    model, on the stages that compute with them.
    """

    def __init__(
        self,
        config: Config,
        architecture: Architecture,
        layout: Layout,
        *,
        head: NumberHead | None = None,
        folder: Path | None = None,
    ) -> None:
        self.config = transformer_config(config, architecture, layout)
        self._head, self._folder = head, folder or config.model_path
        # Of the policy: its processor files say how the features of media are normalised.
        self._family = family_of(config.model_path)
        self.bare = [self._build(architecture, layout, stage) for stage in range(layout.virtual)]
        towers = [model.towers for model in self.bare if getattr(model, "towers", None) is not None]
        kept = [buffer for model in towers for buffer in float32_buffers(model)]
        half = self.config.bf16 or self.config.fp16
        self.wrapped = [Float16Module(self.config, model) if half else model for model in self.bare]
        for module, name, buffer in kept:  # frequencies of the towers, which half precision would round
            setattr(module, name, buffer)
        self.towers = self._shared_towers(architecture, layout, recomputes=config.trainer.recompute != "none")
        for model in self.bare if self.towers is not None else ():
            model.shared = self.towers
        if architecture.experts is not None and architecture.experts.spec.has_bias:
            for model in self.bare:
                _hold_expert_bias(model)

    def _build(self, architecture: Architecture, layout: Layout, stage: int) -> Any:
        virtual = stage if layout.virtual > 1 else None
        stage_arguments = {"ignore_virtual": False, "vp_stage": virtual}
        is_first = parallel_state.is_pipeline_first_stage(**stage_arguments)
        model = self._model_class(is_first=is_first)(
            self.config,
            layer_specs.block_spec(self.config, virtual, grouped_experts=layout.grouped_experts),
            vocab_size=padded_vocabulary(architecture, layout),
            max_sequence_length=architecture.context_length,
            pre_process=is_first,
            post_process=parallel_state.is_pipeline_last_stage(**stage_arguments),
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied_embeddings and self._head is None,
            position_embedding_type="rope",
            vp_stage=virtual,
        )
        rotary = PackedRotaryEmbedding(
            architecture,
            use_cpu_initialization=ON_CPU,
            cp_group=parallel_state.get_context_parallel_group(),
        )
        for turning in (model,) if architecture.latent is None else (x.self_attention for x in model.decoder.layers):
            turning.rotary_pos_emb = rotary
        if architecture.padding is not None:
            freeze_padding(model, architecture.padding)
        if self._head is None:
            return_hidden_states(model)
        elif model.post_process:
            model.output_layer = ValueHead(self.config, self._head)
        return model.to(device())

    def _shared_towers(self, architecture: Architecture, layout: Layout, *, recomputes: bool) -> SharedTowers | None:
        if self._family is None:
            return None
        module = next((model.towers for model in self.bare if model.towers is not None), None)
        if module is None:
            if not layout.shares_towers:
                return None
            module = build_towers(self._folder, device())
            kept = float32_buffers(module)
            module.to(self.config.params_dtype)
            for owner, name, buffer in kept:
                setattr(owner, name, buffer)
        features = Features(architecture.hidden_size, architecture.deepstack_layers)
        return SharedTowers(module, self._family, features, layout, recomputes=recomputes)

    def _model_class(self, *, is_first: bool) -> Any:
        if self._family is None:
            return GPTModel
        towers = build_towers(self._folder, device()) if is_first else None
        return partial(MediaModel, towers=towers)


def _hold_expert_bias(model: Any) -> None:
    """Give routers the bias of the choice of experts as a weight in float32 that is never trained.

    megatron-core would change it after every step.
    """
    for layer in model.decoder.layers:
        if router := getattr(layer.mlp, "router", None):
            bias = torch.zeros(router.config.num_moe_experts, device=router.weight.device)
            router.expert_bias = nn.Parameter(bias, requires_grad=False)


def critic_head(config: Config, folder: Path) -> NumberHead:
    """Head of the critic of a folder's architecture."""
    return NumberHead(TEXT_HEAD if family_of(folder) is None else MEDIA_HEAD, config.trainer.precision)


def trained_head(config: Config) -> NumberHead | None:
    """Head of the model that a run trains, if it is a reward model; None for the output layer of a policy."""
    algorithm = config.algorithm
    if not algorithm.trains_scores:
        return None
    # transformers' sequence classifiers have no bias, its token classifiers have one.
    names = TEXT_HEAD if algorithm.rows == "steps" else {VALUE_WEIGHT: TEXT_HEAD[VALUE_WEIGHT]}
    return NumberHead(names, config.head_precision, algorithm.scores.classes)


def base_weights(config: Config, seed: int) -> Mapping[str, Tensor]:
    """Weights of the run's model folder; a reward model's head that it lacks is drawn, as in the torch engine."""
    stored = stored_weights(config.model_path)
    if not config.algorithm.trains_scores or TEXT_HEAD[VALUE_WEIGHT] in stored:
        return stored
    with torch.device("meta"):
        model = model_maker(config)(device=None)
    return ChainMap(drawn_head(model, seed), stored)  # type: ignore[arg-type]  # is only read


def conversion_of(
    folder: Path, architecture: Architecture, layout: Layout, head: NumberHead | None = None
) -> Conversion:
    """Conversion of the weights of a model folder, or of a model of its architecture with another head."""
    towers = {} if family_of(folder) is None else tower_shapes(folder)
    return Conversion(architecture, padded_vocabulary(architecture, layout), towers, head)


def padded_vocabulary(architecture: Architecture, layout: Layout) -> int:
    """Vocabulary size rounded up to a multiple of the tensor-parallel size."""
    return -(-architecture.vocab_size // layout.tensor) * layout.tensor
