"""The stop string that ended an answer is hidden from the client, and no other text."""

from __future__ import annotations

import numpy as np
import pytest

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.sessions.dialogue import Dialogue, before_stop
from tests.support.chat_folder import make_chat_folder

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


@pytest.fixture(scope="module")
def dialogue(tmp_path_factory: pytest.TempPathFactory) -> Dialogue:
    return Dialogue(Tokenizer(make_chat_folder(tmp_path_factory.mktemp("chat"), TEMPLATE, ["<|end|>"])))


@pytest.mark.parametrize(
    ("text", "stop", "content", "found"),
    [
        ("1ab2ab", ["ab"], "1ab2", "ab"),  # the first one came before rollout.min_tokens
        ("aaa", ["aa"], "a", "aa"),
        ("1ab2", ["ab"], "1ab2", ""),
        ("1ab", ["b", "ab"], "1", "ab"),
        ("1ab<|end|>", ["ab"], "1ab", ""),
        ("", ["ab"], "", ""),
    ],
)
def test_only_the_stop_string_that_ended_an_answer_is_hidden(
    dialogue: Dialogue, text: str, stop: list[str], content: str, found: str
) -> None:
    tokens = dialogue.tokenizer.encode(text, special=False)
    parsed = dialogue.parse(np.zeros(0, np.int32), tokens, (), stop)
    assert (parsed.content, parsed.stop) == (content, found)


def test_text_behind_a_stop_string_in_its_token_is_hidden() -> None:
    assert before_stop("a.b.c", ".", "c") == "a.b"
    assert before_stop("a. b", "</call>", "") == "a. b", "the decoder has left the special token out"
