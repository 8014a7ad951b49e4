"""The section [lora]: the adapter that a run trains in place of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator

from relax_actors.config.sections import Positive, PositiveFloat, Section

ALL_LINEAR: Final = "all-linear"


class LoraSection(Section):
    """[lora]: train a low-rank adapter of the model in `model.path`, whose own weights stay as they are.

    A linear layer computes W x + s B A x, where A `[rank, in]` and B `[out, rank]` are trained (LoRA,
    arXiv:2106.09685, equation 3). Versions of the weights and checkpoints hold the adapter alone. A critic has an
    adapter of its own of the same form.
    """

    path: Path | None = None
    """Folder of an adapter to start from, as PEFT writes it (adapter_config.json, adapter_model.safetensors). It gives
    rank, alpha, rslora, dropout, targets and modules_to_save where they are not set. It must stay as long as the run.
    Without it B starts as zeros, and A at random."""
    rank: Positive = 16
    """Rank of A and B."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapter: s = alpha / rank, or alpha / sqrt(rank) with `rslora`."""
    rslora: bool = False
    """Divide `alpha` by the square root of `rank` (rsLoRA, arXiv:2312.03732), which suits high ranks."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the inputs of A that are dropped in the passes that train. The choice follows from `run.seed`, the
    update and the micro-batch, so a replayed step drops the same."""
    targets: Literal["all-linear"] | tuple[str, ...] = ALL_LINEAR
    """Linear layers that get an adapter: "all-linear" for all but the output head; or a list of full names, of last
    parts of names (`q_proj`), and of patterns of full names (`model.layers.1?.*`), beside which "all-linear" may stand.
    Each must match a layer. Experts get adapters by the names `experts.gate_up_proj` and `experts.down_proj` alone."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained as a whole and belong to the adapter, by full name or last parts of it (`norm`). The
    head of a reward model or critic always is one."""
    export_merged: bool = False
    """Whether the folder `model` at the end of the run also holds the whole model, with the adapter added to its
    weights in the run's precision. A following stage needs it. The adapter itself is in `model/adapter`."""

    @field_validator("targets")
    @classmethod
    def _some_target(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            msg = 'lora.targets is empty; name layers, or set "all-linear"'
            raise ValueError(msg)
        return value
