"""The transformers engine generates as the protocol says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_actors.config import Config
from relax_actors.engines.transformers.engine import TransformersEngine
from tests.conformance.base.inference_engine import FollowsGrammars, MinTokens, SamplesFollowSeeds
from tests.conformance.base.language_model import LanguageModelConformance
from tests.support.models import QWEN3, config_of


class TestTransformersEngine(LanguageModelConformance, SamplesFollowSeeds, MinTokens, FollowsGrammars):
    implements = "transformers"

    @pytest.fixture
    def config(self, tmp_path: Path) -> Config:
        return config_of(tmp_path / "run", QWEN3 | {"max_position_embeddings": 128})

    @pytest.fixture
    def engine(self, config: Config) -> Iterator[TransformersEngine]:
        engine = TransformersEngine(config.model_path)
        yield engine
        engine.close()
