"""Configuration checks of the Megatron trainer: impossible layouts and models are refused without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_actors.config.training import MegatronSection
from relax_actors.engines.megatron import architecture, installation, layout
from relax_actors.engines.megatron.backend import MegatronTrainingBackend
from relax_actors.errors import ConfigError
from tests.support.tiny_media_models import OF_MEGATRON
from tests.support.tiny_megatron import DENSE, MOE, config_of, media_architecture

IMPOSSIBLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (DENSE, {"ranks": 3, "tensor_parallel": 2}, "ranks = 3 is not a multiple"),
    (DENSE, {"virtual_pipeline": 2}, "needs pipeline_parallel > 1"),
    (DENSE, {"sequence_parallel": True}, "leave it out"),
    (DENSE, {"ranks": 4, "tensor_parallel": 4}, "num_key_value_heads = 2"),
    (DENSE, {"ranks": 3, "pipeline_parallel": 3}, "does not divide the model's num_hidden_layers = 4"),
    (DENSE, {"ranks": 2, "pipeline_parallel": 2, "virtual_pipeline": 4}, "virtual_pipeline = 8 does not divide"),
    (DENSE, {"ranks": 2, "pipeline_parallel": 2, "first_stage_layers": 4}, "no equal shares"),
    (
        DENSE,
        {"ranks": 4, "pipeline_parallel": 4, "last_stage_layers": 2},
        "with last_stage_layers = 2, the others of 4",
    ),
    (DENSE, {"first_stage_layers": 2}, "first_stage_layers = 2 needs pipeline_parallel > 1, which is 1"),
    (
        DENSE,
        {"ranks": 2, "pipeline_parallel": 2, "virtual_pipeline": 2, "last_stage_layers": 2},
        "virtual_pipeline = 1, which is 2",
    ),
    (DENSE, {"ranks": 2, "expert_parallel": 2}, "the model has no experts"),
    (DENSE, {"ranks": 2, "tensor_parallel": 2, "expert_tensor_parallel": 1}, "the model has no experts"),
    (DENSE, {"grouped_experts": True}, "grouped_experts = true, but the model has no experts"),
    (MOE | {"moe_intermediate_size": 20}, {"grouped_experts": True}, "multiples of 8, they are 32 and 20"),
    (MOE, {"ranks": 8, "expert_parallel": 8}, "does not divide the model's num_experts = 4"),
    (MOE, {"ranks": 2, "tensor_parallel": 2}, "set sequence_parallel = true"),
    (
        MOE,
        {"ranks": 2, "tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 1},
        "silently trains wrong weights",
    ),
    (MOE, {"ranks": 2, "expert_parallel": 2, "pipeline_parallel": 2}, "expert_parallel x expert_tensor_parallel"),
    (
        DENSE | {"kv_lora_rank": 16, "qk_rope_head_dim": 7},
        {"ranks": 2, "tensor_parallel": 2},
        r"does not divide the model's kv_lora_rank \+ qk_rope_head_dim = 23",
    ),
]
POSSIBLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (DENSE, {}),
    (DENSE, {"ranks": 2, "tensor_parallel": 2, "sequence_parallel": True}),
    (DENSE, {"ranks": 2, "pipeline_parallel": 2, "virtual_pipeline": 2}),
    (DENSE, {"ranks": 2, "pipeline_parallel": 2, "first_stage_layers": 1}),
    (DENSE, {"ranks": 3, "pipeline_parallel": 3, "first_stage_layers": 1, "last_stage_layers": 1}),
    (DENSE, {"ranks": 2, "pipeline_parallel": 2, "first_stage_layers": 3, "last_stage_layers": 1}),
    (DENSE, {"ranks": 8, "tensor_parallel": 2, "context_parallel": 2}),
    (MOE, {"ranks": 2, "expert_parallel": 2}),
    (
        MOE,
        {
            "ranks": 2,
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "expert_parallel": 2,
            "expert_tensor_parallel": 1,
        },
    ),
]


@pytest.mark.parametrize(("model", "section", "reason"), IMPOSSIBLE)
def test_impossible_layout_is_refused_with_reason(model: dict[str, Any], section: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        layout.check(layout.Layout.of(MegatronSection(**section)), model)


@pytest.mark.parametrize(("model", "section"), POSSIBLE)
def test_possible_layout_is_accepted(model: dict[str, Any], section: dict[str, Any]) -> None:
    layout.check(layout.Layout.of(MegatronSection(**section)), model)


def test_grouped_experts_need_a_torch_with_their_product() -> None:
    with pytest.raises(ConfigError, match=r"trainer.megatron.grouped_experts = true needs torch 2.10 .*2.9.1\+cpu"):
        installation.require_grouped_product("trainer", "2.9.1+cpu")
    for enough in ("2.10.0", "2.13.0+cpu", "3.0.0a0+git1"):
        installation.require_grouped_product("trainer", enough)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'.*trainer.backend = \"torch\""),
        ({"attention_bias": True}, 'attention_bias = True.*trainer.backend = "torch"'),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type = 'longrope'.*'yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "rope_type = 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ({"model_type": "glm4_moe", "norm_topk_prob": False}, "norm_topk_prob = False"),
        (
            {"model_type": "glm4_moe", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2},
            "n_group = 4.*topk_group = 2",
        ),
        ({"model_type": "deepseek_v3", "rope_parameters": YARN}, "without mscale"),
        (
            {"model_type": "deepseek_v3", "rope_parameters": YARN | {"mscale": 1, "mscale_all_dim": 0.5}},
            "only that of mscale_all_dim",
        ),
        (
            {"model_type": "deepseek_v3", "rope_parameters": YARN | MSCALE | {"attention_factor": 1.5}},
            "attention_factor = 1.5",
        ),
        ({"model_type": "glm4_moe", "num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
    ],
)
def test_model_that_megatron_core_would_compute_differently_is_refused(fields: dict[str, Any], reason: str) -> None:
    architecture.check(DENSE)
    with pytest.raises(ConfigError, match=reason):
        architecture.check(DENSE | fields)


NO_DEEPSTACK = (
    "the towers of the model add features to its first 3 layers (deepstack_visual_indexes), and the first of 2 "
    "pipeline stages, which holds the towers, has 2 of 4 layers; set first_stage_layers, or lower pipeline_parallel or "
    "virtual_pipeline"
)


def media_body(model_type: str, text: dict[str, Any] | None = None) -> dict[str, Any]:
    body = media_architecture(model_type)
    return body | {"text_config": body["text_config"] | (text or {})}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            media_body("qwen2_audio", {"model_type": "llama"}),
            "text_config.model_type is 'llama', supported is only 'qwen2'",
        ),
        (
            media_body("qwen2_5_vl", {"use_sliding_window": True}),
            "use_sliding_window = True is not supported, only False",
        ),
        (media_body("qwen3_vl", {"attention_bias": True}), "attention_bias = True is not supported, only False"),
        (
            media_body("qwen3_vl_moe", {"rope_parameters": {"rope_type": "yarn"}}),
            "rope_type = 'yarn' is not supported, only 'default', 'mrope'",
        ),
        (
            media_body("qwen3_5"),
            "model_type is 'qwen3_5', supported are .*, qwen3_vl_moe, qwen2_5_omni.*\"torch\" trains",
        ),
        ({"model_type": "llava", "vision_config": {}, "text_config": {}}, "model_type is 'llava', supported are llama"),
    ],
)
def test_decoder_of_a_multimodal_model_that_would_be_computed_differently_is_refused(
    body: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f'^trainer.backend = "megatron": the model\'s {reason}'):
        architecture.check(architecture.decoder_fields(body))


def test_stage_without_the_layers_that_towers_add_to_is_refused_with_reason() -> None:
    body, found = media_body("qwen3_vl_moe"), layout.Layout.of(MegatronSection(ranks=2, pipeline_parallel=2))
    layout.check(found, architecture.decoder_fields(body))
    with pytest.raises(ConfigError) as refused:
        layout.check_towers(found, body)
    assert str(refused.value) == f"trainer.megatron: {NO_DEEPSTACK}"


@pytest.mark.parametrize("model_type", OF_MEGATRON)
def test_multimodal_models_are_accepted(tmp_path: Path, model_type: str) -> None:
    pytest.importorskip("megatron.core", reason="the check refuses megatron where it is not installed")
    section = {"ranks": 4, "tensor_parallel": 2, "sequence_parallel": True}
    config = config_of(tmp_path, media_body(model_type), trainer={"megatron": section})
    assert list(MegatronTrainingBackend().check(config, config.model_path)) == [
        "the trainer has 4 ranks: data 2, tensor 2"
    ]


def test_sizes_that_a_config_leaves_to_transformers_are_checked_later() -> None:
    found = layout.Layout.of(MegatronSection(ranks=2, tensor_parallel=2))
    layout.check(found, {"model_type": "qwen2_audio", "vocab_size": 156032})


def test_missing_megatron_core_error_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "REQUIRED_MODULES", ("missing_megatron.core",))
    with pytest.raises(ConfigError, match="make megatron"):
        installation.require()


def test_relax_check_does_not_import_torch(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        """
[run]
name = "checked"
[model]
[model.architecture]
model_type = "qwen3"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 64
tie_word_embeddings = true
[model.tokenizer]
alphabet = "0123456789>#"
[data]
kind = "jsonl"
path = "data.jsonl"
[trainer]
backend = "megatron"
max_tokens_per_microbatch = 1024
[trainer.megatron]
ranks = 2
tensor_parallel = 2
pipeline_parallel = 2
[rollout]
max_tokens = 8
"""
    )
    (tmp_path / "data.jsonl").write_text('{"prompt": "12>", "answer": "3"}\n')
    code = (
        "import sys; from pathlib import Path\n"
        "from relax_actors.checks import examine; from relax_actors.config import load_config\n"
        f"found = examine(load_config(Path({str(config)!r}), sys.argv[1:]))\n"
        "assert 'torch' not in sys.modules\n"
        "print('|'.join(found.errors))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    installed = True
    try:
        installation.require()
    except ConfigError:
        installed = False
    assert ("is not a multiple of tensor_parallel" if installed else "make megatron") in done.stdout


def notes_of(tmp_path: Path, **section: Any) -> list[str]:
    config = config_of(tmp_path / "run", DENSE, trainer={"megatron": section})
    return list(MegatronTrainingBackend().check(config, config.model_path))


def test_the_check_says_that_a_pipeline_does_not_stream(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="the check refuses megatron where it is not installed")
    not_streamed = (
        "trainer.stream = true has no effect with trainer.megatron.pipeline_parallel = 2: a step is computed when all "
        "of its rows are there, because each early part would fill and drain the pipeline; set trainer.stream = false "
        "to say so, or use data, tensor or context parallelism"
    )
    found = notes_of(tmp_path, ranks=2, pipeline_parallel=2)
    assert found == ["the trainer has 2 ranks: pipeline 2", not_streamed]
    assert notes_of(tmp_path, ranks=2, tensor_parallel=2) == ["the trainer has 2 ranks: tensor 2"]
