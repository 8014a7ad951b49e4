"""What an engine that trains an adapter does differently from others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from relax_actors.data.adapter import PREFIX
from relax_actors.engines.protocols import train
from relax_actors.engines.torch.adapter import MARKS
from relax_actors.weights import files as weights
from tests.conformance.base.gradient_engine import GradientConformance
from tests.conformance.base.training_engine import MakeEngine, begun, folder_of
from tests.support.adapters import adapter_config, base_folder
from tests.support.batches import batch_of, silent


class AdapterConformance(GradientConformance):
    """Suite of engines that train an adapter and a norm."""

    kind: ClassVar[Any]
    """Class of the engine."""

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeEngine:
        base = base_folder(tmp_path)

        def make(algorithm: dict[str, Any] | None = None, **trainer: Any) -> Any:
            sections = {"trainer": {"backend": self.implements} | trainer, "algorithm": algorithm or {}}
            lora = {"rank": 8, "modules_to_save": ["norm"], "export_merged": True}
            return self.kind(adapter_config(tmp_path / "run", base, lora, **sections))

        return make

    @pytest.mark.parametrize("precision", ["bfloat16", "float32"])
    def test_small_steps_are_published_as_deltas_in_half_precision_only(
        self, make: MakeEngine, tmp_path: Path, precision: str
    ) -> None:
        engine = begun(make(precision=precision))
        engine.remember()
        train(engine, batch_of(0), 0, silent)
        assert engine.delta() is None  # an adapter is published whole
        tensors = self.published(engine, tmp_path / "adapter")
        assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{precision}"}

    @pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
    def test_the_exported_folder_holds_the_published_weights(
        self, make: MakeEngine, tmp_path: Path, precision: str
    ) -> None:
        engine = begun(make(precision=precision))
        train(engine, batch_of(0), 0, silent)
        engine.export(folder := folder_of(tmp_path / "model"))
        published = self.published(engine, tmp_path / "adapter")
        exported = weights.load([folder / "adapter" / "adapter_model.safetensors"])
        own = {PREFIX + name: tensor for name, tensor in published.items() if name not in MARKS}
        assert weights.fingerprint(exported) == weights.fingerprint(own)
        merged = AutoModelForCausalLM.from_pretrained(folder)
        assert {tensor.dtype for tensor in merged.parameters()} == {getattr(torch, precision)}
