"""The torch engine trains as the protocol says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_actors.engines.torch.engine import TorchEngine
from tests.conformance.base.training_engine import GradientConformance, MakeEngine
from tests.support.models import QWEN3, config_of, qwen3_moe

ALGORITHMS: dict[str, dict[str, Any]] = {
    "default": {},
    "kl": {"kl_coefficient": 0.1},
    "sequence": {"kl_coefficient": 0.1, "loss": "sequence"},
}


class TestTorchEngine(GradientConformance):
    implements = "torch"

    @pytest.fixture(params=[*ALGORITHMS, "experts"])
    def make(self, tmp_path: Path, request: pytest.FixtureRequest) -> MakeEngine:
        architecture = qwen3_moe(QWEN3) if request.param == "experts" else QWEN3

        def make(algorithm: dict[str, Any] | None = None, **trainer: Any) -> TorchEngine:
            settings = {"learning_rate": 1e-2, "max_tokens_per_microbatch": 100} | trainer
            section = ALGORITHMS.get(request.param, {}) | (algorithm or {})
            return TorchEngine(config_of(tmp_path / "run", architecture, trainer=settings, algorithm=section))

        return make
