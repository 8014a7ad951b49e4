"""Model folder: measuring an existing one, and writing one from an architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.config import Config, validate
from relax_actors.data.model_folder import measure, prepare
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import ConfigError
from tests.support.messages import assert_says

BODY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 21,
    "max_position_embeddings": 77,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_parameters_are_counted_from_the_config(tmp_path: Path, model_type: str, tied: bool) -> None:  # noqa: FBT001
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(BODY | {"model_type": model_type, "tie_word_embeddings": tied}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    facts = measure(tmp_path)
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert (facts.context_length, facts.vocabulary, facts.model_type) == (77, 21, model_type)


def test_parameters_of_stored_weights_are_read_from_their_headers(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "config.json").write_text(json.dumps(BODY | {"model_type": "llama"}))
    save_file({"a": np.zeros((3, 4), np.float32)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": np.zeros(5, np.float32)}, tmp_path / "model-2.safetensors")
    assert measure(tmp_path).parameters == 17


@pytest.mark.parametrize("text", ["{}", "x", "[]", '{"vocab_size": 3}'])
def test_folder_with_an_invalid_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is not .*language model"):
        measure(tmp_path)


@pytest.mark.parametrize("value", ["many", 0, -3, 64.5, True])
def test_a_size_that_is_no_positive_integer_is_refused(tmp_path: Path, value: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BODY | {"model_type": "llama", "hidden_size": value}))
    with pytest.raises(ConfigError) as caught:
        measure(tmp_path)
    assert_says(caught.value, path, f"hidden_size = {value!r}", "above 0")


def test_a_misspelled_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    body = {key: value for key, value in BODY.items() if key != "intermediate_size"}
    path.write_text(json.dumps(body | {"model_type": "llama", "intermidiate_size": 48}))
    with pytest.raises(ConfigError) as caught:
        measure(tmp_path)
    reason = "it has no 'intermediate_size'; rename 'intermidiate_size'"
    assert_says(caught.value, path, "language model", reason)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BODY | {"model_type": "llama"}))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError) as caught:
        measure(tmp_path)
    assert_says(
        caught.value,
        f"model.path {tmp_path}",
        "model-1.safetensors, model-2.safetensors",
        "model.safetensors.index.json",
        "download",
    )


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_a_damaged_shard_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BODY | {"model_type": "llama"}))
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{shard} is no safetensors file"):
        measure(tmp_path)


def test_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a model folder: it has no config\.json"):
        measure(tmp_path / "none")


def run_config(**sections: Any) -> Config:
    body = {"model": {"path": "m"}, "data": {"kind": "jsonl"}}
    return validate(body | sections, "test")


def test_architecture_is_written_as_a_model_folder(tmp_path: Path) -> None:
    body = {key: value for key, value in BODY.items() if key != "vocab_size"} | {"model_type": "llama"}
    model = {"architecture": body, "tokenizer": {"alphabet": "01#"}}
    prepare(run_config(model=model), tmp_path / "model")
    assert measure(tmp_path / "model").vocabulary == 4
    assert Tokenizer(tmp_path / "model").stop_ids == {2}
    before = (tmp_path / "model" / "config.json").read_bytes()
    prepare(run_config(model=model), tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_bytes() == before
    small = {"architecture": body | {"vocab_size": 2}, "tokenizer": {"alphabet": "01#"}}
    with pytest.raises(ConfigError, match=r"model\.architecture\.vocab_size is 2.* 4 ids"):
        prepare(run_config(model=small), tmp_path / "small")


def test_existing_model_is_not_touched(tmp_path: Path) -> None:
    prepare(run_config(), tmp_path / "model")
    assert not (tmp_path / "model").exists()
