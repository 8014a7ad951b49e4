"""Tokenizer of a model folder, and the character tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.data.character_tokenizer import make_character_tokenizer
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import ConfigError, RowError
from tests.support.messages import assert_says

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


def test_decoding_omits_the_end_token_and_the_padding(tokenizer: Tokenizer) -> None:
    end, pad = ALPHABET.index("#"), len(ALPHABET)
    assert tokenizer.stop_ids == {end}
    assert tokenizer.decode([1, 2, end, pad, pad]) == "12"
    assert tokenizer.size == len(ALPHABET) + 1


@pytest.mark.parametrize(
    ("text", "character", "position", "shown"),
    [
        ("x", "x", 1, "x"),
        ("12x", "x", 3, "12x"),
        ("<unknown>", "<", 1, "<unknown>"),
        ("1\t", "\t", 2, "1\t"),
        ("0" * 100 + "x", "x", 101, "0" * 20 + "x"),
    ],
)
def test_unknown_character_is_named_with_its_position(
    tokenizer: Tokenizer, text: str, character: str, position: int, shown: str
) -> None:
    with pytest.raises(RowError) as caught:
        tokenizer.encode(text)
    assert_says(caught.value, f"{character!r} at position {position}", repr(shown), "model.tokenizer.alphabet")


def test_text_outside_of_the_alphabet_is_no_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_id("xy") is None


def test_text_of_one_token_has_an_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_id(">") == ALPHABET.index(">")
    assert tokenizer.token_id("12") is None


@pytest.mark.parametrize(("alphabet", "end"), [("aab", "b"), ("ab", "c"), ("ab", ""), ("ab", "ab"), ("", "")])
def test_inconsistent_alphabet_is_refused(tmp_path: Path, alphabet: str, end: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer\.(alphabet|end)"):
        make_character_tokenizer(alphabet, end, tmp_path)


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path must contain a Hugging Face tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
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
