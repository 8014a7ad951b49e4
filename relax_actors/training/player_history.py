"""What one player of an episode has read and written.

Invariant: the tokens of a sequence only grow. The tokens of a turn are what the model read and sampled, never decoded
and encoded again; where the chat template would write the conversation in another way, a new sequence begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.errors import RowError
from relax_actors.messages import TokenSequence
from relax_actors.training.conversation import Conversation
from relax_actors.training.growing_sequence import GrowingSequence

Array = NDArray[Any]
NO_TOKENS = np.zeros(0, np.int32)


class PlayerHistory:
    """Messages and token sequences of one player; an episode without players has a single history.

    Args:
        name: of the player; empty without players.
        tokens: `[len] int32`, the prompt; empty if the environment gives it.
        messages: the prompt as chat messages; empty for plain text.
        conversation: renders messages.

    Attributes:
        turns: numbers of the player's turns among those of the episode.
        branches: sequences that began because the template rewrote the conversation.
    """

    def __init__(
        self, name: str, tokens: Array, messages: Sequence[dict[str, Any]], conversation: Conversation
    ) -> None:
        self.name, self._prompt, self._conversation = name, tokens, conversation
        self.turns: list[int] = []
        self.branches = 0
        self._messages = [dict(message) for message in messages]
        self._sequences = [GrowingSequence.of(tokens)] if len(tokens) else []
        self._answer = ""

    @property
    def tokens(self) -> Array:
        """Tokens that the model reads next, `[len] int32`."""
        return self._sequences[-1].ids

    @property
    def length(self) -> int:
        """Number of `tokens`; 0 before there are any."""
        return self._sequences[-1].length if self._sequences else 0

    def render(self, messages: list[dict[str, Any]]) -> tuple[Array, bool]:
        """Return the tokens of an observation, and whether they are those of a new sequence.

        Raises:
            RowError: the messages cannot be rendered, or give no token to begin with.
        """
        if not self._sequences:
            found = self._conversation.prompt([*self._messages, *messages])
            if not len(found):
                of_player = f" of player {self.name}" if self.name else ""
                msg = (
                    f"the first one{of_player} is empty, but it is the prompt with environment.prompt = "
                    '"environment"; return a text'
                )
                raise RowError(msg)
            return found, False
        if not self.turns:
            if not messages:
                return NO_TOKENS, False
            if self._messages:
                return self._conversation.prompt([*self._messages, *messages]), True
            return self._conversation.extend((), "", messages).token_ids, False
        extension = self._conversation.extend(self._messages, self._answer, messages)
        if extension.is_faithful:
            return extension.token_ids, False
        whole = [*self._messages, {"role": "assistant", "content": self._answer}, *messages]
        return self._conversation.prompt(whole), True

    def read(self, messages: list[dict[str, Any]], context: Array, *, branches: bool) -> int:
        """Append an observation that `render` gave; return the number of its tokens behind the prompt."""
        if self.turns:
            self._messages += [{"role": "assistant", "content": self._answer}]
        self._messages += messages
        cost = len(context) if self.turns else 0
        if branches and self.turns:
            self.branches += 1
            cost = max(0, cost - self.length)
        elif branches:
            self._sequences.clear()  # the first observation is part of the prompt
        if branches or not self._sequences:
            self._sequences.append(GrowingSequence.of(context))
        else:
            self._sequences[-1].read(context)
        return cost

    def drop_context(self, *, branches: bool) -> None:
        """Remove the last observation, which leaves no room for an answer: the trainer need not read it."""
        if not self.turns:
            self._sequences.clear()
        elif branches:
            self._sequences.pop()
            self.branches -= 1
        else:
            self._sequences[-1].drop_last()

    def write(self, turn: int, answer: str, generated: tuple[Array, Array, Array]) -> None:
        """Append a turn.

        Args:
            turn: number of the turn in the episode.
            answer: its text.
            generated: its tokens, log-probs and versions.
        """
        self._sequences[-1].write(*generated)
        self._answer = answer
        self.turns.append(turn)

    def built(self, *, trained: bool) -> list[TokenSequence]:
        """Return the sequences as they are stored, at least one; their sampled tokens are trained or not."""
        sequences = self._sequences or [GrowingSequence.of(self._prompt)]
        return [sequence.built(trained=trained, player=self.name) for sequence in sequences]
