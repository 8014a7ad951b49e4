"""Stop strings are found at the token that completes them in the text, whatever tokens spell them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from relax_actors.data.character_tokenizer import make_character_tokenizer
from relax_actors.data.token_bytes import TokenBytes
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import StopStrings
from relax_actors.engines.protocols.stop_strings import START
from relax_actors.errors import ConfigError
from relax_actors.training.stops import stops_of
from tests.support.messages import assert_says

TEXT = "abé€🙂\n "
SPECIAL, UNKNOWN = "<|end|>", "<unk>"
texts = st.lists(st.text(TEXT, min_size=1, max_size=5), min_size=1, max_size=3)


def naive(strings: Sequence[str], parts: Sequence[str] | Sequence[bytes]) -> int | None:
    """Number of parts after which what they make up together first contains a string."""
    whole = [part if isinstance(part, bytes) else part.encode() for part in parts]
    for n in range(1, len(whole) + 1):
        if any(string.encode() in b"".join(whole[:n]) for string in strings):
            return n
    return None


def byte_level() -> tokenizers.Tokenizer:
    """A small vocabulary of bytes and merges of them, with a special token, as those of GPT-2, Llama 3 and Qwen."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[SPECIAL],
        show_progress=False,
    )
    inner.train_from_iterator(["ab éab €€ 🙂a\n\nab", "é€ab a b\n"] * 20, trainer)
    return inner


def byte_fallback() -> tokenizers.Tokenizer:
    """A small vocabulary with byte fallback and words that begin with a space, as those of Llama 2 and Mistral."""
    words = ["▁", "▁a", "▁ab", "a", "b", "é", "ab", "▁▁", SPECIAL]
    vocabulary = [UNKNOWN, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    inner = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(vocabulary)}, [], unk_token=UNKNOWN, byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([SPECIAL])
    return inner


def word_piece() -> tokenizers.Tokenizer:
    vocabulary = [UNKNOWN, "a", "b", "##a", "##b", "é", "##é", SPECIAL]
    inner = tokenizers.Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece(cleanup=False)
    return inner


BYTE_LEVEL, BYTE_FALLBACK, WORD_PIECE = byte_level(), byte_fallback(), word_piece()


@given(st.lists(st.text(TEXT).map(str.encode) | st.binary(max_size=3), max_size=30), texts)
def test_found_where_the_bytes_of_the_tokens_first_contain_a_string(tokens: list[bytes], strings: list[str]) -> None:
    found = StopStrings(strings, lambda token: tokens[token]).find(range(len(tokens)))
    assert found == naive(strings, tokens)


@given(st.text(TEXT, max_size=12), st.data())
def test_found_at_whatever_bytes_of_a_letter_tokens_are_cut(text: str, data: st.DataObject) -> None:
    whole = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    tokens = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    strings = data.draw(texts)
    assert StopStrings(strings, lambda token: tokens[token]).find(range(len(tokens))) == naive(strings, tokens)


@given(st.lists(st.sampled_from([b"a", b"b", b"ab", "é".encode()[:1], "é".encode()[1:]]), max_size=12), texts)
def test_state_of_a_sample_depends_on_its_tokens_alone(tokens: list[bytes], strings: list[str]) -> None:
    once, again = (StopStrings(strings, lambda token: tokens[token]) for _ in range(2))
    state = START
    for i in range(len(tokens)):
        state, found = once.advance(state, i)
        resumed = START
        for k in range(i):
            resumed, _ = again.advance(resumed, k)
        assert again.advance(resumed, i) == (state, found)


@pytest.mark.parametrize("inner", [BYTE_LEVEL, BYTE_FALLBACK, WORD_PIECE], ids=["byte-level", "fallback", "word-piece"])
@given(data=st.data())
def test_found_where_the_decoded_text_first_contains_a_string(inner: tokenizers.Tokenizer, data: st.DataObject) -> None:
    """Tokens that any sampling may give, among them such as spell no valid UTF-8."""
    # The word before them keeps decoders from stripping a space.
    word = next(i for i in range(inner.get_vocab_size()) if inner.decode([i]) == "b")
    tokens = data.draw(st.lists(st.integers(0, inner.get_vocab_size() - 1), max_size=15))
    if inner is BYTE_FALLBACK:
        # Its decoder replaces all letters of a run of bytes that is not valid as a whole.
        tokens = [token for token in tokens if not 0x80 < token <= 256]
    strings = data.draw(texts | st.just([SPECIAL]))
    decoded = [inner.decode([word, *tokens[:n]], skip_special_tokens=False)[1:] for n in range(len(tokens) + 1)]
    expected = next((n for n, text in enumerate(decoded) if any(string in text for string in strings)), None)
    assert StopStrings(strings, TokenBytes(inner)).find(tokens) == expected


@pytest.mark.parametrize("inner", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "fallback"])
@given(text=st.text(TEXT + "xyß", min_size=1, max_size=12))
def test_bytes_of_tokens_make_up_the_text(inner: tokenizers.Tokenizer, text: str) -> None:
    made = b"".join(map(TokenBytes(inner), inner.encode(text, add_special_tokens=False).ids))
    assert made.decode().removeprefix(" " if inner is BYTE_FALLBACK else "") == text


def test_special_and_unknown_tokens_have_bytes() -> None:
    for inner in (BYTE_LEVEL, BYTE_FALLBACK, WORD_PIECE):
        token_bytes = TokenBytes(inner)
        assert token_bytes(inner.token_to_id(SPECIAL)).strip() == SPECIAL.encode()
        assert token_bytes(10**6) == b""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(make_character_tokenizer("0123é>#", "#", folder)))
    return Tokenizer(folder)


def test_stop_string_of_one_token_is_a_stop_token_too(tokenizer: Tokenizer) -> None:
    assert stops_of(tokenizer, []) == ({6}, None)
    ids, strings = stops_of(tokenizer, ["1", "é>"])
    assert ids == {1, 6}
    assert strings is not None
    assert [strings.find(tokens) for tokens in ([0, 1, 0], [5, 4, 4, 5], [4, 0, 5])] == [2, 4, None]


def test_stop_string_that_no_tokens_spell_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError) as refused:
        stops_of(tokenizer, ["12", "1x"])
    assert_says(refused.value, "rollout.stop '1x'", "tokens of this model")


def test_stop_string_that_a_normaliser_rewrites_is_refused(tmp_path: Path) -> None:
    inner = byte_level()
    inner.normalizer = normalizers.NFC()
    inner.save(str(tmp_path / "tokenizer.json"))
    assert stops_of(Tokenizer(tmp_path), ["é"])[1] is not None
    with pytest.raises(ConfigError, match="cannot be written"):
        stops_of(Tokenizer(tmp_path), ["e\u0301"])
