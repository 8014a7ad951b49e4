"""What a Megatron trainer can be: layouts that cannot work are refused with the reason, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_actors.config.training import MegatronSection
from relax_actors.engines.megatron import architecture, layout, presence
from relax_actors.errors import ConfigError
from tests.support.tiny_megatron import DENSE, MOE

WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (DENSE, {"ranks": 3, "tensor_parallel": 2}, "ranks = 3 is no multiple"),
    (DENSE, {"virtual_pipeline": 2}, "cuts the stages of a pipeline"),
    (DENSE, {"sequence_parallel": True}, "leave it out"),
    (DENSE, {"ranks": 4, "tensor_parallel": 4}, "num_key_value_heads = 2"),
    (DENSE, {"ranks": 3, "pipeline_parallel": 3}, "does not divide the model's num_hidden_layers = 4"),
    (DENSE, {"ranks": 2, "pipeline_parallel": 2, "virtual_pipeline": 4}, "virtual_pipeline = 8 does not divide"),
    (DENSE, {"ranks": 2, "expert_parallel": 2}, "the model has no experts"),
    (DENSE, {"ranks": 2, "tensor_parallel": 2, "expert_tensor_parallel": 1}, "the model has no experts"),
    (MOE, {"ranks": 8, "expert_parallel": 8}, "does not divide the model's num_experts = 4"),
    (MOE, {"ranks": 2, "tensor_parallel": 2}, "needs sequence_parallel = true"),
    (
        MOE,
        {"ranks": 2, "tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 1},
        "trains wrong weights without a sign of it",
    ),
    (MOE, {"ranks": 2, "expert_parallel": 2, "pipeline_parallel": 2}, "expert_parallel x expert_tensor_parallel"),
]
RIGHT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (DENSE, {}),
    (DENSE, {"ranks": 2, "tensor_parallel": 2, "sequence_parallel": True}),
    (DENSE, {"ranks": 2, "pipeline_parallel": 2, "virtual_pipeline": 2}),
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


@pytest.mark.parametrize(("model", "section", "reason"), WRONG)
def test_layouts_that_cannot_work_are_refused(model: dict[str, Any], section: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        layout.check(layout.Layout.of(MegatronSection(**section)), model)


@pytest.mark.parametrize(("model", "section"), RIGHT)
def test_layouts_that_work_are_taken(model: dict[str, Any], section: dict[str, Any]) -> None:
    layout.check(layout.Layout.of(MegatronSection(**section)), model)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type = 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type = 'llama3'"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_models_that_would_be_taken_for_others_are_refused(fields: dict[str, Any], reason: str) -> None:
    architecture.check(DENSE)
    with pytest.raises(ConfigError, match=reason):
        architecture.check(DENSE | fields)


def test_without_megatron_core_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "NEEDED", ("megatron_that_is_not_there.core",))
    with pytest.raises(ConfigError, match="make megatron"):
        presence.require()


def test_the_check_needs_no_torch(tmp_path: Path) -> None:
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
        "from relax_actors.cli.check import examine; from relax_actors.config import load_config\n"
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
        presence.require()
    except ConfigError:
        installed = False
    assert ("is no multiple of tensor_parallel" if installed else "make megatron") in done.stdout
