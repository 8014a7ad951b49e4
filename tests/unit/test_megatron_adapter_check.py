"""Adapters that Megatron-Core cannot train are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_actors.config.training import MegatronSection
from relax_actors.engines.megatron.adapter_check import check_adapter
from relax_actors.engines.megatron.layout import Layout
from relax_actors.errors import ConfigError
from tests.support.adapters import adapter_config, base_folder
from tests.support.models import QWEN3
from tests.support.text_families import MEGATRON
from tests.support.tiny_media_models import architecture_of

ALONE: dict[str, Any] = {}
EXPERTS: dict[str, Any] = {"targets": ["all-linear", "experts.gate_up_proj", "experts.down_proj"]}
HALVES = {"ranks": 2, "tensor_parallel": 2, "sequence_parallel": True}
STAGES = {"ranks": 2, "pipeline_parallel": 2}


def refusal(folder: Path, architecture: dict[str, Any], lora: dict[str, Any], section: dict[str, Any]) -> str:
    """Error of the check; empty for none."""
    base = base_folder(folder, architecture)
    config = adapter_config(folder / "run", base, lora, trainer={"backend": "megatron", "recompute": "full"})
    try:
        check_adapter(config, Layout.of(MegatronSection(**section)), base, "trainer")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("architecture", "lora", "section", "message"),
    [
        (QWEN3, {"dropout": 0.1}, STAGES, "set lora.dropout = 0 or trainer.recompute"),
        (QWEN3, {"modules_to_save": ["q_proj"]}, ALONE, "in one parameter with model.layers.0.self_attn.k_proj"),
        (MEGATRON["qwen2_moe"], {}, ALONE, "lora.targets match model.layers.0.mlp.shared_expert_gate"),
        (architecture_of("qwen3_vl"), {}, ALONE, "trains models of text"),
        (MEGATRON["qwen3_moe"], EXPERTS, HALVES, "set trainer.megatron.expert_tensor_parallel = 1"),
    ],
    ids=["dropout", "part of a parameter", "gate of shared experts", "pictures", "halves of experts"],
)
def test_what_cannot_be_trained_is_refused_with_the_remedy(
    tmp_path: Path, architecture: dict[str, Any], lora: dict[str, Any], section: dict[str, Any], message: str
) -> None:
    assert message in refusal(tmp_path, architecture, lora, section)


@pytest.mark.parametrize(
    ("architecture", "lora", "section"),
    [
        (QWEN3, {"dropout": 0.1}, ALONE),
        (QWEN3, {}, STAGES),
        (QWEN3, {"modules_to_save": ["q_proj", "k_proj", "v_proj", "norm"], "targets": ["o_proj"]}, ALONE),
        (MEGATRON["qwen2_moe"], {"targets": ["q_proj", "o_proj"]}, ALONE),
        (MEGATRON["qwen3_moe"], EXPERTS, HALVES | {"expert_tensor_parallel": 1}),
    ],
)
def test_what_can_be_trained_is_not_refused(
    tmp_path: Path, architecture: dict[str, Any], lora: dict[str, Any], section: dict[str, Any]
) -> None:
    assert not refusal(tmp_path, architecture, lora, section)
