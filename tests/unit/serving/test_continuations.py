"""Conversations of a session that continue its answers, and those that agent.on_rewrite = "error" refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.data.tokenizer import Tokenizer
from relax_actors.messages.generate import GenerateCall, Refusal
from relax_actors.messages.session_log import ROOT, Turn
from relax_actors.sessions.continuations import Continuation, Continuations, conversation_keys
from relax_actors.sessions.dialogue import Dialogue
from relax_actors.sessions.forest import Forest
from relax_actors.sessions.service import Refused
from tests.support.chat_folder import make_chat_folder
from tests.support.messages import assert_says

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
CHANGED = (
    "messages[{}] is not the answer that this session gave here; this run trains whole conversations alone: send it "
    "back as it was, or begin another one with other messages"
)
Message = dict[str, Any]


def said(*contents: str) -> list[Message]:
    """A conversation that the user begins."""
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(contents)]


class Talk:
    """A session whose policy gives the answers that a test writes."""

    def __init__(self, folder: Path) -> None:
        self._dialogue = Dialogue(Tokenizer(make_chat_folder(folder, TEMPLATE, ["<|end|>"])))
        self._continuations = Continuations(self._dialogue, must_continue=True)
        self.forest = Forest()

    def plan(self, messages: list[Message], settings: dict[str, Any] | None = None) -> Continuation:
        call = GenerateCall("c", messages=messages, settings=settings or {})
        return self._continuations.plan(self.forest, call, conversation_keys(messages, [], call.settings))

    def answer(self, messages: list[Message], text: str) -> None:
        plan, answer = self.plan(messages), {"role": "assistant", "content": text}
        tokens = self._dialogue.tokenizer.encode(f"{text}<|end|>", special=False)
        state, numbers = conversation_keys([*messages, answer])[-1], np.zeros(len(tokens), np.float32)
        self.forest.add(
            Turn(
                plan.parent,
                plan.observed,
                tokens,
                numbers,
                np.ones(len(tokens), np.int32),
                asked=conversation_keys(messages)[-1],
                state=state,
                messages=[*plan.new, answer],
            )
        )


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    return Talk(tmp_path)


def test_conversations_that_begin_otherwise_are_new_ones(talk: Talk) -> None:
    shots = said("1+1", "2", "2+2", "4")
    talk.answer([*shots, *said("3+3")], "6")
    assert talk.plan([*shots, *said("4+4")]).parent == ROOT, "the examples before another question"
    assert talk.plan(said("other", "of mine", "go on")).parent == ROOT
    assert talk.plan([*shots, *said("3+3", "6", "sure?")]).parent == 0
    assert talk.plan([*shots, *said("3+3")]).parent == ROOT, "asked once more"


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        (said("a", "changed", "go on"), 1),
        ([*said("a"), *said("go on")], 1),
        (said("a", "b", "c", "changed", "go on"), 3),
        (said("a", "b", "other", "invented", "go on"), 3),
    ],
    ids=["changed", "left out", "changed later", "invented"],
)
def test_changed_and_dropped_answers_are_refused(talk: Talk, messages: list[Message], place: int) -> None:
    talk.answer(said("a"), "b")
    talk.answer(said("a", "b", "c"), "d")
    with pytest.raises(Refused) as caught:
        talk.plan(messages)
    assert (caught.value.answer.refusal, caught.value.answer.detail) == (Refusal.INVALID, CHANGED.format(place))


def test_conversation_with_other_settings_of_the_template_is_refused(talk: Talk) -> None:
    talk.answer(said("a"), "b")
    with pytest.raises(Refused) as caught:
        talk.plan(said("a", "b", "c"), {"enable_thinking": False})
    assert_says(caught.value.answer.detail, "messages[1]", "chat_template_kwargs", "send the same")
    assert talk.plan(said("a"), {"enable_thinking": False}).parent == ROOT


def test_answers_of_a_lost_agent_do_not_bind_its_successor(talk: Talk) -> None:
    talk.answer(said("a"), "b")
    talk.forest.restart()
    assert talk.plan([*said("a"), *said("go on")]).parent == ROOT
