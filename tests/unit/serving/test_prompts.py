"""Prompts of a session as text or tokens: those that begin with an earlier answer continue its tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.messages.generate import GenerateCall
from relax_actors.messages.session_log import ROOT, Turn
from relax_actors.sessions.agent_turns import asked_key
from relax_actors.sessions.continuations import Continuation, Prompts
from relax_actors.sessions.dialogue import Dialogue
from relax_actors.sessions.forest import Forest
from tests.support.chat_folder import make_chat_folder

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Writer:
    """A session whose policy gives the answers that a test writes."""

    def __init__(self, folder: Path) -> None:
        dialogue = Dialogue(Tokenizer(make_chat_folder(folder, TEMPLATE, ["<|end|>"])))
        self.tokenizer, self._prompts, self.forest = dialogue.tokenizer, Prompts(dialogue), Forest()

    def encode(self, text: str) -> np.ndarray:
        return self.tokenizer.encode(text, special=False)

    def plan(self, prompt: str | np.ndarray, player: str = "") -> Continuation:
        fields = {"text": prompt} if isinstance(prompt, str) else {"tokens": prompt}
        return self._prompts.plan(self.forest, GenerateCall("c", player=player, **fields))

    def answer(self, prompt: str | np.ndarray, answer: str, stop: tuple[str, ...] = (), player: str = "") -> int:
        plan, tokens = self.plan(prompt, player), self.encode(answer)
        message = self._prompts.answer(tokens, list(stop))
        zeros, ones = np.zeros(len(tokens), np.float32), np.ones(len(tokens), np.int32)
        turn = Turn(plan.parent, plan.observed, tokens, zeros, ones, messages=[*plan.new, message], player=player)
        return self.forest.add(turn)

    def read(self, number: int) -> str:
        return self.tokenizer.spell(self.forest.tokens(number))


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


def test_text_that_begins_with_an_answer_continues_its_tokens(writer: Writer) -> None:
    first = writer.answer("1+1=", "2<|end|>")
    second = writer.answer("1+1=2, 2+2=", "4<|end|>")
    assert writer.forest.turns[second].parent == first
    assert writer.read(second) == "1+1=2<|end|>, 2+2=4", "the stop token that was sampled stays"
    assert writer.plan("1+1=2, 2+2=4?").parent == second, "the longest"
    assert writer.plan("1+1=2, 2+2=5?").parent == first
    for other in ("1+1=", "1+1=3, 2+2=", "2+2="):
        assert writer.plan(other).parent == ROOT
    assert [message["content"] for message in writer.forest.conversation(second)] == ["1+1=", "2", ", 2+2=", "4"]


def test_answer_that_was_cut_off_is_continued_without_a_token_between(writer: Writer) -> None:
    first = writer.answer("count: ", "1 2")
    plan = writer.plan("count: 1 2")
    assert (plan.parent, plan.observed.tolist()) == (first, [])
    second = writer.answer("count: 1 2", " 3")
    assert writer.read(second) == "count: 1 2 3"
    (sequence,) = writer.forest.sequences()
    assert sequence.loss_mask.tolist() == [n >= len("count: ") for n in range(len("count: 1 2 3"))]


@pytest.mark.parametrize("appended", ["\nObservation:", ""], ids=["with", "without"])
def test_stop_string_is_read_once_whether_the_client_appends_it_or_not(writer: Writer, appended: str) -> None:
    first = writer.answer("Q", "Thought\nObservation:", stop=("\nObservation:",))
    assert writer.forest.conversation(first)[-1]["content"] == "Thought"
    second = writer.answer(f"QThought{appended} 42", "A")
    assert writer.forest.turns[second].parent == first
    assert writer.read(second) == "QThought\nObservation: 42A"


def test_empty_answer_is_not_continued(writer: Writer) -> None:
    writer.answer("Q", "<|end|>")
    assert writer.plan("Q").parent == ROOT, "asked once more"


def test_tokens_that_begin_with_those_of_an_answer_continue_it(writer: Writer) -> None:
    first = writer.answer(writer.encode("ab"), "c<|end|>")
    more = np.concatenate([writer.forest.tokens(first), writer.encode("d")])
    plan = writer.plan(more)
    assert (plan.parent, plan.observed.tolist()) == (first, writer.encode("d").tolist())
    assert writer.plan(more[:-2]).parent == ROOT, "without the stop token"


def test_prompts_continue_turns_of_their_player_alone(writer: Writer) -> None:
    first = writer.answer("Q", "A", player="solver")
    assert writer.plan("QA!", "solver").parent == first
    assert writer.plan("QA!", "critic").parent == ROOT
    assert writer.plan(writer.encode("QA!"), "critic").parent == ROOT


def test_requests_with_different_numbers_of_answers_find_different_turns() -> None:
    calls = [
        GenerateCall("c", session="s", **fields)
        for fields in ({"text": "Q"}, {"text": "Q", "n": 2}, {"text": "Q", "player": "solver"})
    ]
    calls.append(GenerateCall("c", session="s", messages=[{"role": "user", "content": "Q"}]))
    assert len({asked_key(call) for call in calls}) == len(calls)
