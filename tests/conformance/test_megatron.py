"""The Megatron engine with one rank trains as the protocol says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.base.training_engine import GradientConformance, MakeEngine
from tests.support.tiny_megatron import DENSE, MOE, config_of, skip_if_missing

skip_if_missing()

from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 not before the check


class TestMegatronEngine(GradientConformance):
    implements = "megatron"

    @pytest.fixture(params=[DENSE, MOE], ids=["qwen3", "qwen3_moe"])
    def make(self, tmp_path: Path, request: pytest.FixtureRequest) -> MakeEngine:
        def make(algorithm: dict[str, Any] | None = None, **trainer: Any) -> MegatronEngine:
            section = {"kl": {"place": "loss", "coefficient": 0.1}} | (algorithm or {})
            return MegatronEngine(config_of(tmp_path / "run", request.param, trainer=trainer, algorithm=section))

        return make
