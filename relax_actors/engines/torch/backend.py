"""The backends `trainer.backend = "torch"` and `backend = "torch"` of roles that score."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relax_actors.config import Config
from relax_actors.engines.backends import refuse_options
from relax_actors.engines.protocols import ScoringEngine, TrainingEngine
from relax_actors.runtime import Context


class TorchTrainingBackend:
    """Training in the trainer's process with torch; see `TrainingBackend`."""

    def build(self, context: Context) -> TrainingEngine:
        """Build the model and its optimizer."""
        from relax_actors.engines.torch.engine import TorchEngine  # noqa: PLC0415 only a process that trains needs torch
        from relax_actors.engines.torch.kernels import set_up  # noqa: PLC0415

        set_up(context.config.run)
        return TorchEngine(context.config)

    def check(self, config: Config, model: Path) -> Iterator[str]:
        """Any model of transformers works."""
        del model
        refuse_options(config, "trainer")
        yield from ()


class TorchScoringBackend:
    """Scoring in the actor's process with torch; see `ScoringBackend`."""

    def build(self, context: Context, device: str, *, follows: bool) -> ScoringEngine:
        """Build the model."""
        from relax_actors.engines.torch.kernels import set_up  # noqa: PLC0415 only a process that scores needs torch
        from relax_actors.engines.torch.scorer import TorchScorer  # noqa: PLC0415

        set_up(context.config.run)
        return TorchScorer(context.config, device, follows=follows)

    def check(self, config: Config, model: Path, setting: str) -> Iterator[str]:
        """Any model of transformers works."""
        del config, model, setting
        yield from ()
