"""The torch engine trains as the protocol says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_actors.engines.protocols import train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.stored_weights import fingerprint_of
from tests.conformance.base.adapter_engine import AdapterConformance
from tests.conformance.base.gradient_engine import GradientConformance
from tests.conformance.base.training_engine import MakeEngine, begun, folder_of
from tests.support.batches import batch_of, silent
from tests.support.models import QWEN3, config_of, qwen3_moe

ALGORITHMS: dict[str, dict[str, Any]] = {
    "default": {},
    "kl": {"kl": {"place": "loss", "coefficient": 0.1}},
    "sequence": {"kl": {"place": "loss", "coefficient": 0.1}, "aggregate": "sample_mean_of_means"},
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

    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_a_checkpoint_has_the_fingerprint_of_the_published_weights(
        self, make: MakeEngine, tmp_path: Path, precision: str
    ) -> None:
        engine, folder = begun(make(precision=precision)), folder_of(tmp_path / "checkpoint")
        train(engine, batch_of(0), 0, silent)
        engine.save(folder)
        assert fingerprint_of(folder) == engine.fingerprint()
        kept = folder_of(tmp_path / "kept")
        engine.begin_save(kept)()
        assert fingerprint_of(kept) == engine.fingerprint()
        engine.remember()
        train(engine, batch_of(1), 1, silent)
        assert engine.publish(tmp_path / "full") == fingerprint_of(tmp_path / "full") == engine.fingerprint()


class TestTorchEngineWithAnAdapter(AdapterConformance):
    implements = "torch"
    kind = TorchEngine
