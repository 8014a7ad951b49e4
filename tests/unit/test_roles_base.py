"""Tokenizer, model folder and evaluation schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.algorithms.schedules import is_evaluated
from relax_actors.config import Config, validate
from relax_actors.data.model_folder import measure, prepare
from relax_actors.data.tokenizer import Tokenizer, make_character_tokenizer
from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import Prompt
from relax_actors.runtime import COLUMNS

ALPHABET = "0123456789>#\n é数🙂"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    ids = make_character_tokenizer(ALPHABET, "#", folder)
    (folder / "config.json").write_text(json.dumps(ids))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@given(st.text(ALPHABET.replace("#", "")))
def test_characters_round_trip(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [ALPHABET.index(c) for c in text]
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens.tolist()) == text


def test_decoding_leaves_the_end_and_the_padding_out(tokenizer: Tokenizer) -> None:
    end, pad = ALPHABET.index("#"), len(ALPHABET)
    assert tokenizer.stop_ids == {end}
    assert tokenizer.decode([1, 2, end, pad, pad]) == "12"
    assert tokenizer.size == len(ALPHABET) + 1


@pytest.mark.parametrize("text", ["x", "12x", "X>", "<unknown>", "\t", "\0"])
def test_an_unknown_character_is_an_error_of_the_row(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RowError, match="cannot be tokenized"):
        tokenizer.encode(text)


def test_a_text_of_one_token_has_an_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_id(">") == ALPHABET.index(">")
    assert tokenizer.token_id("12") is None


@pytest.mark.parametrize(("alphabet", "end"), [("aab", "b"), ("ab", "c"), ("ab", ""), ("ab", "ab"), ("", "")])
def test_an_alphabet_that_contradicts_itself_is_refused(tmp_path: Path, alphabet: str, end: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer\.(alphabet|end)"):
        make_character_tokenizer(alphabet, end, tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path must hold a Hugging Face tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer"):
        Tokenizer(tmp_path)


def test_stop_ids_come_from_both_files(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert Tokenizer(tmp_path).stop_ids == {3, 4, 5}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer(tmp_path).stop_ids == frozenset()


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
def test_parameters_are_counted_as_the_model_has_them(tmp_path: Path, model_type: str, tied: bool) -> None:  # noqa: FBT001
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


@pytest.mark.parametrize("text", ["{}", "x", '{"max_position_embeddings": "many"}', '{"vocab_size": 3}'])
def test_a_folder_whose_config_is_no_models_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is no config of a language model"):
        measure(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no model folder: it has no config\.json"):
        measure(tmp_path / "none")


def run_config(**sections: Any) -> Config:
    body = {"model": {"path": "m"}, "data": {"kind": "jsonl"}}
    return validate(body | sections, "test")


def test_an_architecture_is_written_as_a_folder_that_can_be_measured(tmp_path: Path) -> None:
    body = {key: value for key, value in BODY.items() if key != "vocab_size"} | {"model_type": "llama"}
    model = {"architecture": body, "tokenizer": {"alphabet": "01#"}}
    prepare(run_config(model=model), tmp_path / "model")
    assert measure(tmp_path / "model").vocabulary == 4
    assert Tokenizer(tmp_path / "model").stop_ids == {2}
    before = (tmp_path / "model" / "config.json").read_bytes()
    prepare(run_config(model=model), tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_bytes() == before
    small = {"architecture": body | {"vocab_size": 2}, "tokenizer": {"alphabet": "01#"}}
    with pytest.raises(
        ConfigError, match=r"model\.architecture\.vocab_size is 2, the tokenizer has 4 ids; leave it out"
    ):
        prepare(run_config(model=small), tmp_path / "small")


def test_a_folder_of_the_users_is_not_touched(tmp_path: Path) -> None:
    prepare(run_config(), tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(("every", "expected"), [(0, [0, 10]), (4, [0, 4, 8, 10]), (5, [0, 5, 10]), (99, [0, 10])])
def test_the_first_every_so_many_and_the_last_version_are_evaluated(every: int, expected: list[int]) -> None:
    config = run_config(run={"steps": 10}, eval={"every": every, "data": {"kind": "jsonl"}})
    assert [version for version in range(11) if is_evaluated(config, version)] == expected


def test_without_a_section_nothing_is_evaluated() -> None:
    assert not any(is_evaluated(run_config(), version) for version in range(200))


def test_prompt_is_a_column() -> None:
    assert COLUMNS["prompt"] is Prompt
