"""What one player of an episode has read and written.

Invariant: the tokens of a sequence only grow. The tokens of a turn are what the model read and sampled, never decoded
and encoded again; where the chat template would write the conversation in another way, a new sequence begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.errors import RowError
from relax_actors.messages import TokenSequence, Turn
from relax_actors.training.conversation import Conversation
from relax_actors.training.episode_input import Media, Reading, Start
from relax_actors.training.growing_sequence import GrowingSequence

Array = NDArray[Any]
NO_TOKENS = np.zeros(0, np.int32)


class PlayerHistory:
    """Messages and token sequences of one player; an episode without players has a single history.

    Args:
        name: of the player; empty without players.
        start: what the episode begins with.
        conversation: renders messages.
        prepare: prepares media; None for a model that reads text only.

    Attributes:
        media: media of what the model reads next; None for a model that reads text only.
        turns: numbers of the player's turns among those of the episode.
        branches: sequences that began because the template rewrote the conversation.
    """

    def __init__(self, name: str, start: Start, conversation: Conversation, prepare: Media | None = None) -> None:
        self.name, self._start, self._conversation, self._prepare = name, start, conversation, prepare
        self.turns: list[int] = []
        self.branches = 0
        self.media = start.media
        self._messages = [dict(message) for message in start.messages]
        self._sources = list(start.sources)
        self._sequences = [self._first()] if len(start.tokens) else []
        self._answer, self._answered = "", NO_TOKENS

    def _first(self) -> GrowingSequence:
        """Return the sequence of the prompt."""
        return GrowingSequence.of(self._start.tokens, self._start.observed)

    @property
    def tokens(self) -> Array:
        """Tokens that the model reads next, `[len] int32`."""
        return self._sequences[-1].ids

    @property
    def length(self) -> int:
        """Number of `tokens`; 0 before there are any."""
        return self._sequences[-1].length if self._sequences else 0

    def render(self, messages: list[dict[str, Any]], where: str) -> tuple[list[dict[str, Any]], Reading]:
        """Return messages without the files of their media, and what the model reads.

        Args:
            messages: observation.
            where: what the observation is of, for errors.

        Raises:
            RowError: the messages cannot be rendered or give no token to begin with, or their media cannot be read.
        """
        if self._prepare is None:
            return messages, Reading(*self._rendered(messages))
        messages, sources = self._prepare.admit(messages, where)
        tokens, branches = self._rendered(messages)
        sources = [*self._sources, *sources] if branches else sources
        if (branches or not self._sequences) or self.media is None:
            found = self._prepare.read(0, self._prepare.none, tokens, sources, where)
        elif len(tokens):
            found = self._prepare.read(self.length, self.media, tokens, sources, where)
        else:
            return messages, Reading(tokens, branches, self.media)
        return messages, Reading(found.tokens, branches, found.media, found.observed, sources)

    def recorded(self, turn: Turn) -> Reading:
        """Return what the model read before a turn that was written down.

        Raises:
            StoreError: media are lost.
        """
        seen, media = turn.media, self.media
        if self._prepare is not None and seen is not None:
            media = self._prepare.again(media if media is not None and seen.start else self._prepare.none, seen)
        return Reading(turn.context, turn.branches, media, seen, () if seen is None else seen.sources)

    def _rendered(self, messages: list[dict[str, Any]]) -> tuple[Array, bool]:
        """Return the tokens of an observation, and whether they are those of a new sequence."""
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
            return self._conversation.extend((), NO_TOKENS, messages).token_ids, False
        extension = self._conversation.extend(self._messages, self._answered, messages)
        if extension.is_faithful:
            return extension.token_ids, False
        whole = [*self._messages, {"role": "assistant", "content": self._answer}, *messages]
        return self._conversation.prompt(whole), True

    def read(self, messages: list[dict[str, Any]], reading: Reading) -> int:
        """Append an observation that `render` gave; return the number of its tokens behind the prompt."""
        if self.turns:
            self._messages += [{"role": "assistant", "content": self._answer}]
        self._messages += messages
        self._sources = [*([] if reading.branches else self._sources), *reading.sources]
        self.media = reading.media
        cost = len(reading.tokens) if self.turns else 0
        if reading.branches and self.turns:
            self.branches += 1
            cost = max(0, cost - self.length)
        elif reading.branches:
            self._sequences.clear()  # the first observation is part of the prompt
        if reading.branches or not self._sequences:
            self._sequences.append(GrowingSequence.of(reading.tokens, reading.observed))
        else:
            self._sequences[-1].read(reading.tokens, reading.observed)
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
        self._answer, self._answered = answer, generated[0]
        self.turns.append(turn)

    def built(self, *, trained: bool) -> list[TokenSequence]:
        """Return the sequences as they are stored, at least one; their sampled tokens are trained or not."""
        sequences = self._sequences or [self._first()]
        return [sequence.built(trained=trained, player=self.name) for sequence in sequences]
