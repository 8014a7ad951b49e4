"""The torch critic trains as the protocol says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_actors.config.training import CriticSection
from relax_actors.engines.torch.critic import TorchCritic
from tests.conformance.base.critic_engine import CriticConformance, MakeCritic, policy_of
from tests.support.models import QWEN3, config_of


class TestTorchCritic(CriticConformance):
    implements = "torch"

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeCritic:
        def make(path: Path | None = None, **trainer: Any) -> TorchCritic:
            config = config_of(tmp_path / "run", QWEN3, trainer={"max_tokens_per_microbatch": 64} | trainer)
            critic = TorchCritic(config, CriticSection(learning_rate=1e-2, value_clip=0, path=path))
            critic.initialise(policy_of(config, tmp_path) if path is None else None)
            return critic

        return make
