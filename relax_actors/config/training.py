"""The sections [trainer], [staleness] and [weights]: how the model is trained and published."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from relax_actors.config.sections import (
    Fraction,
    Named,
    NonNegative,
    NonNegativeInt,
    PoolSection,
    Positive,
    PositiveFloat,
    Section,
)
from relax_actors.registry.catalog import CRITIC_ENGINES, TRAINING_ENGINES, WEIGHT_TRANSPORTS


class WarmStartSection(Section):
    """[trainer.warm_start]: supervised steps on the answers of the data, before version 0."""

    steps: Positive
    """Number of supervised steps."""
    rows: Positive = 64
    """Tasks of each step, of a mixture by its first weights."""
    learning_rate: PositiveFloat = 1e-3
    """Learning rate of these steps."""


class LossScaleSection(Section):
    """[trainer.loss_scale]: factor of the loss with `trainer.precision = "float16"`, of trainer and critic.

    An update whose gradients overflow is skipped, and the factor is halved.
    """

    initial: Annotated[float, Field(ge=2.0**-20)] = 64.0
    """Factor of the first update. The loss of a micro-batch is a sum over its tokens, and so are its gradients: a
    smaller factor suffices than for a mean. With `algorithm.aggregate = "sample_mean_of_means"`, or a warm start,
    losses are means: give a larger one."""
    growth_interval: Positive = 200
    """Updates without overflow after which the factor is doubled."""


class FakeQuantSection(Section):
    """[trainer.fake_quant]: train weights for few bits (quantisation-aware training), with the torch engine.

    Forward and backward compute with weights that integers of `bits` bits and a scale for each group express, and the
    optimizer updates copies of them in float32. The published weights are those on the grid, rounded to
    `trainer.precision`: rollouts compute with the same numbers. A conversion of the exported model to these integers
    loses nothing in float32; in half precision the rounding moves some weights to the next integer.
    """

    bits: Literal[4, 8] = 4
    """Bits of a weight; the numbers of a group are symmetric around 0, from -7 to 7 times its scale with 4."""
    group: Positive = 32
    """Neighbours along the inputs of a layer that share a scale."""
    weights: list[str] = Field(default=["*_proj.weight"], min_length=1)
    """Patterns of Hugging Face weight names; `*` matches anything. By default the linear layers of attention and MLP.
    Experts that transformers fuses are `*_proj`."""


class TorchSection(Section):
    """[trainer.torch] and [critic.torch]: how ranks of the torch engine share the model (FSDP2)."""

    ranks: Positive = 1
    """Number of training processes on the node, one for each GPU if there are GPUs. Each holds an equal part of the
    weights, gradients and optimizer state, and trains other sequences of a step."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, also with one rank: only what computes is on the GPU.
    Without a GPU it changes nothing."""


class MegatronSection(Section):
    """[trainer.megatron] and [critic.megatron]: parallelism of Megatron-Core."""

    ranks: Positive = 1
    """Number of training processes, one for each GPU if there are GPUs. Data parallelism is what remains after tensor,
    pipeline and context parallelism."""
    local_ranks: Positive | None = None
    """Ranks on the node of the trainer; actors `trainer_rank` of other nodes host the others. All if not set. Only in
    [trainer.megatron]."""
    tensor_parallel: Positive = 1
    """Ranks that share each layer."""
    pipeline_parallel: Positive = 1
    """Stages that the layers are divided into. The towers of a model with media are on the first one."""
    first_stage_layers: Positive | None = None
    """Layers of the first stage, if it has more or fewer than the others; not with `virtual_pipeline`."""
    last_stage_layers: Positive | None = None
    """Layers of the last stage, which has the output head; as `first_stage_layers`."""
    virtual_pipeline: Positive = 1
    """Stages of the pipeline on each of its ranks (interleaved schedule)."""
    context_parallel: Positive = 1
    """Ranks that share each sequence."""
    expert_parallel: Positive = 1
    """Ranks that share the experts."""
    expert_tensor_parallel: Positive | None = None
    """Ranks that share each expert; `tensor_parallel` if not set."""
    sequence_parallel: bool = False
    """Share norms and residuals among the ranks of `tensor_parallel`; required there for a model with experts."""
    distributed_optimizer: bool = True
    """Share the optimizer state among the ranks of data parallelism."""
    share_towers: bool = True
    """Encode each image, video and sound on one of the tensor-, context- and pipeline-parallel ranks that read it, in
    place of all of those on the first stage. The other stages then have a copy of the towers."""
    grouped_experts: bool | Literal["auto"] = "auto"
    """Multiply the tokens of all experts of a layer in two calls of torch's `grouped_mm`, in place of two for each
    expert; by default where torch has a kernel for it, in bfloat16 on a GPU. Experts with adapters are computed one by
    one."""

    @property
    def own_ranks(self) -> int:
        """Ranks on the node of the actor that they belong to."""
        return self.ranks if self.local_ranks is None else self.local_ranks

    @property
    def remote_ranks(self) -> int:
        """Ranks on other nodes."""
        return self.ranks - self.own_ranks

    @model_validator(mode="after")
    def _local_ranks_are_some(self) -> MegatronSection:
        if self.remote_ranks < 0:
            msg = (
                f"local_ranks = {self.local_ranks} is more than ranks = {self.ranks}; lower local_ranks, or raise ranks"
            )
            raise ValueError(msg)
        return self


class TrainerRankSection(PoolSection):
    """Settings of the role `trainer_rank`, which follow from [trainer]."""

    device: str
    """Torch device."""


class TrainerSection(PoolSection):
    """[trainer]: the optimizer and its steps."""

    backend: Annotated[str, Named(TRAINING_ENGINES)] = "torch"
    """Training engine: `torch`, with the ranks of [trainer.torch]; `megatron`, Megatron-Core with the ranks of
    [trainer.megatron] (`make megatron` installs it); `simulated`, which takes the time that [simulate] says; or an
    engine of another package."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of a training engine of another package; the built-in engines take none."""
    prompts_per_step: Positive = 16
    """Prompts of an optimizer step, each with its group of samples."""
    minibatches: Positive = 1
    """Parts that the rows of a batch are cut into, with one optimizer update for each part; divides `prompts_per_step`.
    Which rows form a part follows from `run.seed`, the step and the epoch."""
    epochs: Positive = 1
    """Passes over the rows of a batch. With more than one update per batch the probability ratio leaves 1."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or decayed to `final_fraction` of the peak at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up to the peak learning rate."""
    final_fraction: Fraction = 0.1
    """Learning rate of the last step as a fraction of the peak, for a schedule that decays."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of AdamW."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Betas of AdamW."""
    epsilon: PositiveFloat = 1e-8
    """Epsilon of AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """Norm that gradients are clipped to."""
    max_tokens_per_microbatch: Positive = 8192
    """Maximum tokens of a micro-batch, prompts included; a longer sequence is refused. Placeholders of media count once
    more for the towers, once for all sequences of a prompt. A shared prefix counts once, the last trained token of a
    sequence not at all, since it is no input."""
    share_prefixes: bool = True
    """Compute a prefix that sequences of a row share once in a micro-batch, forward and backward, also in the roles
    that score: the prompt of a group's samples, and what branches of a sample have in common. Loss and gradient are the
    same up to rounding. Not with context parallelism of Megatron-Core, which cuts sequences."""
    stream: bool = True
    """Whether forward and backward of a step start when its first rows fill a micro-batch (of each data-parallel rank);
    else when all rows are there, as also with `trainer.megatron.pipeline_parallel` above 1, and where the trainer's
    memory leaves a shared device (`placement.release`)."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of forward and backward, and of the published weights; the optimizer always works in float32.
    "float16" has more digits than "bfloat16" and less range, so the loss is scaled by [trainer.loss_scale]."""
    loss_scale: LossScaleSection = LossScaleSection()
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes to save memory (activation checkpointing): none; those of
    attention, with Megatron-Core; or all but the inputs of layers. The numbers are the same."""
    device: str = "auto"
    """Torch device; "auto" is CUDA if available, else the CPU."""
    freeze: list[str] = Field(default_factory=list)
    """Patterns of Hugging Face weight names that are not trained, e.g. `model.embed_tokens.*`; `*` matches anything."""
    fake_quant: FakeQuantSection | None = None
    """Train for weights of few bits; see [trainer.fake_quant]. None for all bits of `precision`."""
    router_replay: bool = False
    """Router replay (R3) for models with experts: rollouts record the experts chosen for each token, and the trainer
    and `actor_fwd` use the recorded experts, because rounding can change the top-k choice."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Number of checkpoints to keep."""
    async_checkpoints: bool = False
    """Write the files of a checkpoint from a copy in memory while the next step runs. The checkpoint is published when
    the trainer is idle, after that step at the latest. The last checkpoint of a run is always synchronous."""
    warm_start: WarmStartSection | None = None
    torch: TorchSection = TorchSection()
    megatron: MegatronSection = MegatronSection()
    replicas: Literal[1] = 1
    """One actor owns the weights."""
    deadline: PositiveFloat = 300.0
    """Seconds without progress after which the trainer counts as hung, is killed and replaced."""

    @field_validator("precision", mode="before")
    @classmethod
    def _has_layers_for_it(cls, precision: object) -> object:
        if str(precision).lower().startswith(("fp8", "float8", "mxfp8")):
            msg = (
                "training in 8 bits needs the layers of Transformer Engine, and both training engines use those of "
                'torch; set "bfloat16"'
            )
            raise ValueError(msg)
        return precision

    @model_validator(mode="after")
    def _minibatches_are_equal(self) -> TrainerSection:
        if self.prompts_per_step % self.minibatches:
            msg = (
                f"trainer.minibatches = {self.minibatches} does not divide trainer.prompts_per_step = "
                f"{self.prompts_per_step}; choose a divisor, so that all updates of a batch have as many rows"
            )
            raise ValueError(msg)
        return self

    @property
    def shares_prefixes(self) -> bool:
        """Whether shared prefixes are computed once: ranks of context parallelism share each sequence instead."""
        return self.share_prefixes and self.megatron.context_parallel == 1

    @property
    def updates(self) -> int:
        """Optimizer updates of a batch."""
        return self.minibatches * self.epochs

    @property
    def elsewhere(self) -> TrainerRankSection | None:
        """Settings of the actors that host ranks on other nodes; None without any."""
        count = self.megatron.remote_ranks if self.backend == "megatron" else 0
        if count == 0:
            return None
        limit, secrets = self.memory_limit_mib, self.secrets
        return TrainerRankSection(
            replicas=count, device=self.device, deadline=self.deadline, memory_limit_mib=limit, secrets=secrets
        )


class CriticSection(PoolSection):
    """[critic]: the value model of PPO, trained by a role of its own.

    It follows the trainer's batches with the same rows, order, minibatches and epochs, and shares the trainer's
    `schedule`, `betas`, `epsilon`, `max_tokens_per_microbatch`, `precision`, `recompute` and settings of checkpoints.
    """

    backend: Annotated[str, Named(CRITIC_ENGINES)] = "torch"
    """Engine of the critic: `torch`, with the ranks of [critic.torch]; `megatron`, Megatron-Core with the ranks of
    [critic.megatron]; or an engine of another package."""
    path: Path | None = None
    """Folder of a token-classification model with one label, such as a run exports to `critic`: a critic to start from.
    By default the critic starts from version 0 of the policy, with a value head of zeros."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW for the critic."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of AdamW for the critic."""
    max_grad_norm: PositiveFloat = 1.0
    """Norm that gradients of the critic are clipped to."""
    value_clip: NonNegative = 0.2
    """Clip range of a value around the value before the batch, as in PPO2; 0 for no clipping."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start of the run that train the critic only: the weights of the policy stay those of version 0."""
    torch: TorchSection = TorchSection()
    megatron: MegatronSection = MegatronSection()
    device: str = "auto"
    """Torch device; "auto" is CUDA if available, else the CPU."""
    replicas: Literal[1] = 1
    """One actor owns the critic's weights."""
    deadline: PositiveFloat = 300.0
    """Seconds without progress after which the critic counts as hung, is killed and replaced."""


class StalenessSection(Section):
    """[staleness]: how far generation may run ahead of training."""

    max: NonNegativeInt = 1
    """Maximum staleness: how many steps ahead of the trained version rows are admitted; 0 is on-policy."""
    policy: Literal["drop", "correct"] = "drop"
    """What happens to a row with a token older than `max` versions: "drop" replaces the row, "correct" trains it and
    requires a correction or rejection in [algorithm]."""


class WeightsSection(Section):
    """[weights]: how weights get from the trainer to other actors."""

    delta: Literal["auto", "off"] = "auto"
    """With `trainer.precision = "bfloat16"` or `"float16"` publish only the changes since the previous version, where
    these are smaller and reproduce the same bits; actors that generate then keep a copy of the weights in memory."""
    full_every: Positive = 16
    """Maximum versions between full sets of weights; a late joiner reads at most this many files."""
    transport: Annotated[str, Named(WEIGHT_TRANSPORTS)] = "store"
    """How actors receive weights: `store` reads the files."""
