"""Which rows a warm start trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker.store import Store
from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.training.warm_start import warm_start
from tests.support.models import QWEN3, config_of


class Seen(TorchEngine):
    """An engine that remembers the first token of each sample."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.firsts: list[int] = []

    def warm_start(self, samples: Sequence[TrainSample], *arguments: Any) -> Any:
        """Train samples."""
        self.firsts += [int(sample.token_ids[0]) for sample in samples]
        return super().warm_start(samples, *arguments)


def test_sources_of_a_mixture_are_drawn_by_their_first_weights(tmp_path: Path) -> None:
    parts = {}
    for name, count, weight in (("1", 90, 0.25), ("2", 10, 0.75), ("3", 50, 0.0)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(f"{json.dumps({'prompt': f'{name}>', 'answer': name})}\n" * count)
        parts[name] = {"kind": "jsonl", "path": str(path), "weight": weight}
    config = config_of(
        tmp_path / "run",
        QWEN3,
        data={
            "kind": "mixture",
            "mixture": parts,
            "curriculum": [{"step": 1, "weights": {"3": 1.0}}],
            "function": None,
        },
        rollout={"max_tokens": 8},
        trainer={"prompts_per_step": 2, "warm_start": {"steps": 2, "rows": 8, "learning_rate": 1e-3}},
    )
    engine = Seen(config)
    engine.initialise(5)
    warm_start(config, engine, lambda: None, Store(tmp_path / "store"))
    tokens = sorted(set(engine.firsts))
    assert [engine.firsts.count(token) for token in tokens] == [4, 12]
