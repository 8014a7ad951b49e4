"""The sections that say how the model is trained: [trainer], [algorithm], [staleness]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_actors.config.sections import Fraction, PoolSection, Positive, PositiveFloat, Section


class WarmStartSection(Section):
    """[trainer.warm_start]: supervised steps on the data's answers before version 0."""

    steps: Positive
    rows: Positive = 64
    learning_rate: PositiveFloat = 1e-3


class TrainerSection(PoolSection):
    """[trainer]"""

    backend: Literal["torch"] = "torch"
    rows: Positive = 16
    """Rows of a step."""
    learning_rate: PositiveFloat = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    final_fraction: Fraction = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    epsilon: PositiveFloat = 1e-8
    clip_norm: PositiveFloat = 1.0
    token_budget: Positive = 8192
    """Tokens of a micro-batch, padding included."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What forward and backward compute in; the optimizer's own weights are always float32."""
    device: str = "auto"
    checkpoint_every: Positive = 50
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    warm_start: WarmStartSection | None = None
    replicas: Literal[1] = 1
    deadline: PositiveFloat = 300.0


class AlgorithmSection(Section):
    """[algorithm]: GRPO and its variants."""

    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip for negative advantages; off if not set."""
    loss: Literal["token", "sequence"] = "token"
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL to the model at the start of the run."""


class StalenessSection(Section):
    """[staleness]"""

    max: Annotated[int, Field(ge=0)] = 1
    """How many steps ahead of the trained version rows may be admitted: 0 is on-policy."""
