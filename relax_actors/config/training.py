"""The sections that say how the model is trained: [trainer], [algorithm], [staleness], [weights]."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax_actors.config.sections import Fraction, PoolSection, Positive, PositiveFloat, Section


class WarmStartSection(Section):
    """[trainer.warm_start]: supervised steps on the data's answers before version 0."""

    steps: Positive
    rows: Positive = 64
    learning_rate: PositiveFloat = 1e-3


class MegatronSection(Section):
    """[trainer.megatron]: how the ranks of `trainer.backend = "megatron"` share the model."""

    ranks: Positive = 1
    """Processes that train as one: a GPU each where there are GPUs. What tensor, pipeline and context parallelism
    leave over is data parallelism."""
    tensor_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    virtual_pipeline: Positive = 1
    """Stages of the pipeline that each of its ranks has."""
    context_parallel: Positive = 1
    expert_parallel: Positive = 1
    expert_tensor_parallel: Positive | None = None
    """As `tensor_parallel` if not set."""
    sequence_parallel: bool = False
    """Share norms and residuals between the ranks of `tensor_parallel`, too; needed there by a model with experts."""
    distributed_optimizer: bool = True
    """Share the optimizer's state between the ranks of data parallelism."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward computes again: none, those of attention, or all but the layers' inputs."""


class TrainerSection(PoolSection):
    """[trainer]"""

    backend: Literal["torch", "megatron", "simulated"] = "torch"
    """`megatron` trains with Megatron-Core, in as many processes as [trainer.megatron] says; `make megatron` installs
    it."""
    prompts_per_step: Positive = 16
    """Prompts, each with its group of samples, that an optimizer step trains on."""
    learning_rate: PositiveFloat = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    final_fraction: Fraction = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    epsilon: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat = 1.0
    max_tokens_per_microbatch: Positive = 8192
    """Tokens of a micro-batch."""
    stream: bool = True
    """Whether forward and backward of a step begin when its first rows fill a micro-batch; else when all are there."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What forward and backward compute in; the optimizer's own weights are always float32."""
    device: str = "auto"
    freeze: list[str] = Field(default_factory=list)
    """Patterns of the Hugging Face names of weights that are not trained, as `model.embed_tokens.*`; `*` matches
    anything."""
    router_replay: bool = False
    """R3, for models with experts: rollouts record which experts were chosen for every token, and the trainer and
    actor_fwd compute with these in place of their own choice, which rounding makes another one now and then."""
    checkpoint_every: Positive = 50
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    async_checkpoints: bool = False
    """The files of a checkpoint are written while the next step runs, from a copy in memory; it is published when
    nothing else is to be done, after that step at the latest. The last one of a run is not."""
    warm_start: WarmStartSection | None = None
    megatron: MegatronSection = MegatronSection()
    replicas: Literal[1] = 1
    deadline: PositiveFloat = 300.0


class AlgorithmSection(Section):
    """[algorithm]: GRPO and its variants."""

    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip for negative advantages; off if not set."""
    filter_zero_variance: bool = False
    """Drop and refill rows whose samples all have the same reward (dynamic sampling, arXiv 2503.14476)."""
    step_normalisation: Literal["none", "std", "whiten"] = "none"
    """Normalise advantages over all rows of a step: divide by their standard deviation, or whiten them (subtract the
    mean, then divide). A step then trains when all of its rows are there (no streaming)."""
    loss: Literal["token", "sequence"] = "token"
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL to the model at the start of the run."""
    proximal: Literal["rollout", "trainer", "actor_fwd"] = "rollout"
    """Whose log-probs the clipped ratio is taken against: those that the tokens were sampled with; the trainer's own,
    before the step (decoupled PPO); or column `actor_fwd`, `[total] float32`, of a role that writes it."""
    correction: Literal["none", "importance", "tis", "icepop"] = "none"
    """Weight of a token's loss by w, its proximal over its rollout probability: 1; w; w up to `correction_high`; w from
    `correction_low` to `correction_high`, else 0. Needs `proximal` to be another than the rollout."""
    correction_low: Fraction = 0.5
    correction_high: Annotated[float, Field(ge=1)] = 2.0
    """2 is usual for tis, 5 for icepop."""
    reject: Literal["none", "geometric", "max"] = "none"
    """Leave out samples with w outside of `reject_low` to `reject_high`, as a geometric mean or at any token; with
    `proximal = "rollout"` w is the trainer's probability over the rollout's."""
    reject_low: Fraction = 0.5
    reject_high: Annotated[float, Field(ge=1)] = 2.0

    @model_validator(mode="after")
    def _corrects_something(self) -> AlgorithmSection:
        if self.correction != "none" and self.proximal == "rollout":
            msg = (
                f"algorithm.correction = {self.correction!r} weighs by the proximal policy over the rollout's, "
                'and they are one here; set algorithm.proximal to "trainer" or "actor_fwd"'
            )
            raise ValueError(msg)
        return self


class StalenessSection(Section):
    """[staleness]"""

    max: Annotated[int, Field(ge=0)] = 1
    """How many steps ahead of the trained version rows may be admitted: 0 is on-policy."""
    policy: Literal["drop", "correct"] = "drop"
    """A row with a token older than `max` versions is dropped and refilled, or trained all the same; the latter needs
    a correction or rejection in [algorithm]."""


class WeightsSection(Section):
    """[weights]: how the trainer gives them to the rollout."""

    delta: Literal["auto", "off"] = "auto"
    """With trainer.precision = "bfloat16" only what changed since the version before is written, where that is shorter
    and leads to the same bits; actors that generate then keep a copy of the weights in memory."""
    full_every: Positive = 16
    """Versions after which all weights are written again, at the latest; one that joins late reads so many files."""
    transport: Literal["store", "torch"] = "store"
    """How actors get them: from the files in the store, or, while they can, from the trainer's memory over
    torch.distributed (gloo). The files are written all the same, and read whenever the other way fails."""
    listen: str = "127.0.0.1"
    """IPv4 address of the trainer's machine that `transport = "torch"` listens on; nothing is encrypted."""
    patience: Annotated[float, Field(gt=0, le=20)] = 10.0
    """Seconds after which an actor reads the file instead, with `transport = "torch"`."""

    @model_validator(mode="after")
    def _transport(self) -> WeightsSection:
        fields = type(self).model_fields
        idle = [name for name in ("listen", "patience") if getattr(self, name) != fields[name].default]
        if self.transport == "store" and idle:
            msg = f'weights.{idle[0]} is of use only with weights.transport = "torch"; set that, or remove it'
            raise ValueError(msg)
        try:
            unusable = IPv4Address(self.listen).is_unspecified
        except ValueError:
            unusable = True
        if unusable:
            msg = f"weights.listen = {self.listen!r} is no IPv4 address that others can connect to; name one"
            raise ValueError(msg)
        return self
