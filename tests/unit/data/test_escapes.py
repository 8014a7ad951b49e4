"""Texts of environments, tools and agents are encoded whatever characters they hold, always in the same way."""

from __future__ import annotations

import string
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.data.character_tokenizer import make_character_tokenizer
from relax_actors.data.renderer import Renderer
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import RowError
from relax_actors.sessions.conversation import ChatConversation, Conversation, PlainConversation
from relax_actors.sessions.dialogue import Dialogue
from tests.support.chat_folder import make_chat_folder

SPECIAL = {"image": "<|image|>"}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
HEX = string.digits + "abcdefuU\\x"
ALPHABETS = [HEX + "#", "0123456789?>#", "0123456789#", string.printable + "é"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for alphabet in ALPHABETS:
        found[alphabet] = folder = tmp_path_factory.mktemp("model")
        make_character_tokenizer(alphabet, "#", folder, SPECIAL)
    return found


@pytest.mark.parametrize(
    ("alphabet", "text", "spelled", "escaped", "dropped"),
    [
        (ALPHABETS[0], "1 Z\u2713\U0001f642", "1\\x20\\x5a\\u2713\\U0001f642", 4, 0),
        (ALPHABETS[0], "<|image|>7<|image>", "<|image|>7\\x3c\\x7c\\x69\\x6da\\x67e\\x3e", 6, 0),
        (ALPHABETS[0], "\ud800", "\\ud800", 1, 0),
        (ALPHABETS[1], "Error: 12>", "???????12>", 7, 0),
        (ALPHABETS[2], "Error: 12", "12", 0, 7),
        (ALPHABETS[3], "caf\u00e9\n", "caf\u00e9\n", 0, 0),
    ],
)
def test_a_character_that_cannot_be_encoded_is_escaped_replaced_or_left_out(
    folders: dict[str, Path], alphabet: str, text: str, spelled: str, escaped: int, dropped: int
) -> None:
    tokenizer = Tokenizer(folders[alphabet])
    found = tokenizer.encode_any(text)
    np.testing.assert_array_equal(found, tokenizer.encode(spelled))
    assert dict(tokenizer.replaced) == (
        {"characters_escaped": escaped, "characters_dropped": dropped} if escaped or dropped else {}
    )


@given(alphabet=st.sampled_from(ALPHABETS), texts=st.lists(st.text(), max_size=6), data=st.data())
def test_tokens_follow_from_the_text_and_the_vocabulary_alone(
    folders: dict[str, Path], alphabet: str, texts: list[str], data: st.DataObject
) -> None:
    """An actor that takes a row over has seen other texts before."""
    first, other = Tokenizer(folders[alphabet]), Tokenizer(folders[alphabet])
    found = [first.encode_any(text).tolist() for text in texts]
    order = data.draw(st.permutations(range(len(texts))))
    again = {n: other.encode_any(texts[n]).tolist() for n in order}
    assert found == [again[n] for n in range(len(texts))]
    assert list(chain.from_iterable(found)) == first.encode_any("".join(texts)).tolist(), (
        "the escape of a character has no context"
    )


@given(alphabet=st.sampled_from(ALPHABETS), text=st.text())
def test_counts_are_those_of_the_characters_that_the_tokenizer_lacks(
    folders: dict[str, Path], alphabet: str, text: str
) -> None:
    tokenizer = Tokenizer(folders[alphabet])
    tokenizer.encode_any(text)
    lacking = tokenizer.escapes.lacking(text)
    assert set(lacking) == set(text) - set(alphabet)
    assert tokenizer.replaced.total() == sum(character in lacking for character in text)


def test_the_data_of_a_run_is_not_escaped(folders: dict[str, Path]) -> None:
    with pytest.raises(RowError, match="'Z' at position 2"):
        Tokenizer(folders[ALPHABETS[0]]).encode("1Z")


def plain(tokenizer: Tokenizer) -> Conversation:
    return PlainConversation(tokenizer)


@pytest.mark.parametrize("make", [plain, ChatConversation, Renderer])
def test_conversations_read_observations_with_any_character(
    tmp_path: Path, make: Callable[[Tokenizer], object]
) -> None:
    tokenizer = Tokenizer(make_chat_folder(tmp_path, TEMPLATE, ["<|end|>"], unknown="<unknown>"))
    conversation: Conversation = make(tokenizer)  # type: ignore[assignment]
    said = tokenizer.encode("7<|end|>", special=False)
    history, new = [{"role": "user", "content": "caf\u00e9?"}], [{"role": "user", "content": "\u2713 1"}]
    spelled = [{"role": "user", "content": "\\u2713 1"}]
    found, expected = (conversation.extend(history, said, messages) for messages in (new, spelled))
    assert found.is_faithful
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(conversation.prompt(new), conversation.prompt(spelled))
    assert tokenizer.replaced == {"characters_escaped": 2, "characters_dropped": 0}


def test_the_gateway_reads_messages_with_any_character(tmp_path: Path) -> None:
    dialogue = Dialogue(Tokenizer(make_chat_folder(tmp_path, TEMPLATE, ["<|end|>"], unknown="<unknown>")))
    found, expected = (
        dialogue.prompt([{"role": "user", "content": text}], (), {}) for text in ("\u2713 1", "\\u2713 1")
    )
    np.testing.assert_array_equal(found, expected)
    assert dialogue.tokenizer.replaced == {"characters_escaped": 1, "characters_dropped": 0}
