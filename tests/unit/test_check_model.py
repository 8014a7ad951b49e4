"""`relax check` of a model: what transformers cannot build, and folders that cannot be used."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from relax_actors.config import load_config
from relax_actors.data.model_folder import prepare
from relax_actors.engines.torch.architectures import check_architecture
from relax_actors.errors import ConfigError
from tests.support.messages import assert_says
from tests.unit.test_check import ARCHITECTURE, DEMO, errors

pytestmark = pytest.mark.usefixtures("own_import_path", "own_working_folder")
NOT_CAUSAL = "is not a causal language model of the installed transformers;"


@pytest.mark.usefixtures("asks_transformers_here")
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            ["num_key_value_heads=3"],
            "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3; change one of them",
        ),
        (
            ["model_type=llama", "hidden_size=66"],
            "hidden_size = 66 is not a multiple of num_attention_heads = 4; change one of them",
        ),
        (["head_dim=15"], "head_dim = 15 is odd; rotary positions need an even number"),
        (
            ["dtype=fp8"],
            "dtype = 'fp8' is no floating-point type of torch; use one of auto, float32, bfloat16, float16, float64",
        ),
        (["num_hidden_layers=0"], "num_hidden_layers = 0 must be a whole number above 0"),
        (["num_attention_heads='four'"], "num_attention_heads = 'four' must be a whole number above 0"),
    ],
)
def test_an_architecture_that_cannot_be_built_is_refused_with_the_field(settings: list[str], problem: str) -> None:
    assert errors(*(f"{ARCHITECTURE}.{setting}" for setting in settings)) == (f"{ARCHITECTURE}: {problem}",)


@pytest.mark.slow
def test_names_that_transformers_does_not_know_are_refused_together() -> None:
    settings = ["model_type=t5", "hidden_act=sillu", "rope_parameters={rope_type='yarm'}"]
    model_type, activation, rope = errors(*(f"{ARCHITECTURE}.{setting}" for setting in settings))
    assert_says(model_type, ARCHITECTURE, "model_type = 't5'", "llama", "qwen3")
    assert_says(activation, "hidden_act = 'sillu'", "'silu'")
    assert "rope_type = 'yarm' is not a scaling" in rope
    assert "did you mean 'yarn'?" in rope


@pytest.mark.usefixtures("asks_transformers_here")
def test_a_configuration_that_transformers_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    config = load_config(DEMO, [f"{ARCHITECTURE}.model_type=gemma2", f"{ARCHITECTURE}.layer_types=['none']"])
    prepare(config, tmp_path)
    with pytest.raises(ConfigError, match=r"transformers cannot build this model: .*layer_types"):
        check_architecture(config, tmp_path)


def test_a_usual_model_is_checked_without_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")  # fails where transformers is asked
    assert errors(f"{ARCHITECTURE}.model_type=llama", f"{ARCHITECTURE}.rope_parameters={{rope_type='yarn'}}") == ()
    (error,) = errors(f"{ARCHITECTURE}.model_type=gemma2")
    assert "transformers cannot be asked about this model" in error
    assert "reinstall transformers" in error


@pytest.mark.usefixtures("asks_transformers_here")
def test_head_dim_is_a_remedy_where_the_model_has_it(tmp_path: Path) -> None:
    path = tmp_path / "demo.toml"
    path.write_text(DEMO.read_text().replace("head_dim = 16\n", "").replace("hidden_size = 64", "hidden_size = 66"))
    sys.path.append(str(DEMO.parent))
    problem = "hidden_size = 66 is not a multiple of num_attention_heads = 4; change one of them, or set head_dim"
    assert errors(config=path) == (f"{ARCHITECTURE}: {problem}",)
    assert errors(f"{ARCHITECTURE}.head_dim=16", config=path) == ()


def test_a_model_folder_that_cannot_be_used_is_refused_with_its_path(tmp_path: Path) -> None:
    folder, toml = tmp_path / "model", tmp_path / "run.toml"
    toml.write_text(
        f'[model]\npath = "{folder}"\n[data]\nkind = "python"\nfunction = "tiny_tasks.make"\n'
        "[rollout]\nmax_tokens = 6\n"
    )
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    assert errors(config=toml) == (f"model.path {folder} is not a model folder: it has no config.json",)
    prepare(load_config(DEMO), folder)
    assert errors(config=toml) == ()
    (folder / "pytorch_model.bin").touch()
    weights = f"model.path {folder} has no *.safetensors, only pytorch_model.bin; convert the weights to safetensors"
    assert errors(config=toml) == (weights,)
    body = json.loads((folder / "config.json").read_text()) | {"dtype": "fp8"}
    (folder / "config.json").write_text(json.dumps(body))
    first, second = errors(config=toml)
    assert first.startswith(f"{folder / 'config.json'}: dtype = 'fp8'")
    assert second == weights
