"""Several ranks of the torch engine, and the same training with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relax_actors.config import Config
from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.engines.torch.engine import TorchEngine
from tests.support.batches import batch_of, silent
from tests.support.models import config_of

STEPS = 3
KL = {"kl": {"place": "loss", "coefficient": 0.1}}
Batches = Callable[[int], Sequence[TrainSample]]


def ranks_config(
    folder: Path, architecture: dict[str, Any], ranks: int, algorithm: dict[str, Any] | None = None, **trainer: Any
) -> Config:
    """Configure a run whose trainer has some ranks."""
    offload = trainer.pop("offload", False)
    settings = {"learning_rate": 1e-3, "max_tokens_per_microbatch": 40, "torch": {"ranks": ranks, "offload": offload}}
    return config_of(folder, architecture, trainer=settings | trainer, algorithm=KL | (algorithm or {}))


@contextmanager
def ranks_of(config: Config) -> Iterator[Any]:
    """Start the engine of a configuration: ranks, or one in this process."""
    if config.trainer.torch.ranks == 1:
        yield TorchEngine(config)
        return
    group = TrainerGroup(config, lambda *_: None)
    try:
        yield group
    finally:
        group.close()


def trained(engine: Any, steps: range = range(STEPS), batches: Batches = batch_of) -> list[dict[str, float]]:
    """Take steps, and return their metrics."""
    return [dict(train(engine, batches(step), step, silent).metrics) for step in steps]
