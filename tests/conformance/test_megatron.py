"""The Megatron engine and its critic, with one rank, train as the protocols say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_actors.config.training import CriticSection
from tests.conformance.base.adapter_engine import AdapterConformance
from tests.conformance.base.critic_engine import CriticConformance, MakeCritic, policy_of
from tests.conformance.base.gradient_engine import GradientConformance
from tests.conformance.base.training_engine import MakeEngine
from tests.support.tiny_megatron import DENSE, MOE, config_of, skip_if_missing

skip_if_missing()

from relax_actors.engines.megatron.mcore.critic import MegatronCritic  # noqa: E402 not before the check
from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 not before the check


class TestMegatronEngine(GradientConformance):
    implements = "megatron"

    @pytest.fixture(params=[DENSE, MOE], ids=["qwen3", "qwen3_moe"])
    def make(self, tmp_path: Path, request: pytest.FixtureRequest) -> MakeEngine:
        def make(algorithm: dict[str, Any] | None = None, **trainer: Any) -> MegatronEngine:
            section = {"kl": {"place": "loss", "coefficient": 0.1}} | (algorithm or {})
            return MegatronEngine(config_of(tmp_path / "run", request.param, trainer=trainer, algorithm=section))

        return make


class TestMegatronEngineWithAnAdapter(AdapterConformance):
    implements = "megatron"
    kind = MegatronEngine


class TestMegatronCritic(CriticConformance):
    implements = "megatron"

    @pytest.fixture(params=["float32", "bfloat16"])
    def make(self, tmp_path: Path, request: pytest.FixtureRequest) -> MakeCritic:
        def make(path: Path | None = None, **trainer: Any) -> MegatronCritic:
            config = config_of(tmp_path / "run", DENSE, trainer={"precision": request.param} | trainer)
            settings = CriticSection(backend="megatron", learning_rate=1e-2, value_clip=0, path=path)
            critic = MegatronCritic(config, settings)
            critic.initialise(policy_of(config, tmp_path) if path is None else None)
            return critic

        return make
