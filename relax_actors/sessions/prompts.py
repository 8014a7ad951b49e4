"""What a prompt of a session continues that is no conversation but text or tokens: an earlier answer, or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages.generate import GenerateCall
from relax_actors.messages.session_log import ROOT
from relax_actors.sessions.dialogue import Dialogue, Message, before_stop
from relax_actors.sessions.forest import Continuation, Forest

PROMPT = "prompt"
"""Role of a message that is a prompt, or what a prompt appends to an earlier answer."""


class Prompts:
    """Finds what prompts continue.

    Args:
        dialogue: its tokenizer is that of the model.
    """

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue, self._tokenizer = dialogue, dialogue.tokenizer

    def plan(self, forest: Forest, call: GenerateCall) -> Continuation:
        """Return what a prompt continues: the longest of the player's earlier turns that it begins with.

        Raises:
            RowError: the text cannot be tokenized.
        """
        ends = {
            number: self._text_end(forest, number, call.text) if call.text else _token_end(forest, number, call.tokens)
            for number, turn in enumerate(forest.turns)
            if turn.player == call.player
        }
        at, parent = max(((end, number) for number, end in ends.items() if end), default=(0, ROOT))
        if not call.text:
            observed = call.tokens[at:]
            return Continuation(parent, observed, [_prompt(self._tokenizer.spell(observed))])
        text, is_first = call.text[at:], parent == ROOT
        observed = self._tokenizer.encode_any(text, special=is_first) if text else np.zeros(0, np.int32)
        return Continuation(parent, observed, [_prompt(text)])

    def answer(self, tokens: NDArray[Any], stop: list[str]) -> Message:
        """Return an answer as a message: its text is that which the client gets."""
        text = before_stop(self._tokenizer.decode(tokens), *self._dialogue.stop_of(tokens, stop))
        return {"role": "assistant", "content": text}

    def _text_end(self, forest: Forest, number: int, text: str) -> int:
        """Return where the text of a turn, and of all before it, ends in a prompt; 0 if the prompt begins otherwise.

        The stop string that ended an answer may stand in the prompt or not: the policy has read it in both cases.
        """
        at = 0
        for turn in (forest.turns[n] for n in forest.path(number)):
            if turn.state:  # of a conversation
                return 0
            prompt, answer = turn.messages
            said = (self._tokenizer.decode(turn.tokens), answer["content"])
            whole = next((t for one in said if one and text.startswith(t := prompt["content"] + one, at)), "")
            if not whole:
                return 0
            at += len(whole)
        return at


def _prompt(text: str) -> Message:
    return {"role": PROMPT, "content": text}


def _token_end(forest: Forest, number: int, tokens: NDArray[Any]) -> int:
    known = forest.tokens(number)
    return len(known) if np.array_equal(tokens[: len(known)], known) else 0
