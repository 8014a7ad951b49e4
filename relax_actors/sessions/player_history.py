"""What one player of an episode has read and written.

Invariant: the tokens of a sequence only grow. The tokens of a turn are what the model read and sampled, never decoded
and encoded again; where the chat template would write the conversation in another way, a new sequence begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.errors import RowError
from relax_actors.messages import ObservedMedia, TokenSequence, Turn
from relax_actors.messages.samples import NOT_SAMPLED
from relax_actors.messages.session_log import ROOT
from relax_actors.sessions.conversation import Conversation
from relax_actors.sessions.episode_input import Media, Reading, Start
from relax_actors.sessions.forest import Forest

Array = NDArray[Any]
NO_TOKENS = np.zeros(0, np.int32)


class PlayerHistory:
    """Messages of one player, and its place in the forest of an episode; without players there is a single history.

    Args:
        name: of the player; empty without players.
        start: what the episode begins with.
        conversation: renders messages.
        forest: turns of all players.
        prepare: prepares media; None for a model that reads text only.

    Attributes:
        media: media of what the model reads next; None for a model that reads text only.
        turns: numbers of the player's turns among those of the episode.
        branches: sequences that began because the template rewrote the conversation.
    """

    def __init__(
        self, name: str, start: Start, conversation: Conversation, forest: Forest, prepare: Media | None = None
    ) -> None:
        self.name, self._start, self._conversation, self._forest = name, start, conversation, forest
        self._prepare = prepare
        self.turns: list[int] = []
        self.branches = 0
        self.media = start.media
        self._messages = [dict(message) for message in start.messages]
        self._sources = list(start.sources)
        # The turn that the next one continues, all tokens up to its end, and what is read behind it.
        self._parent, self._ids = ROOT, NO_TOKENS
        self._read, self._observed = start.tokens, [] if start.observed is None else [start.observed]

    @property
    def tokens(self) -> Array:
        """Tokens that the model reads next, `[len] int32`."""
        return np.concatenate([self._ids, self._read])

    @property
    def before(self) -> int:
        """Number of tokens up to the end of the turn that the next one continues."""
        return len(self._ids)

    @property
    def length(self) -> int:
        """Number of `tokens`; 0 before there are any."""
        return len(self._ids) + len(self._read)

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
        if branches or not self.length or self.media is None:
            prepared = self._prepare.read(0, self._prepare.none, tokens, sources, where)
        elif len(tokens):
            prepared = self._prepare.read(self.length, self.media, tokens, sources, where)
        else:
            return messages, Reading(tokens, branches, self.media)
        observed = [] if prepared.observed is None else [prepared.observed]
        return messages, Reading(prepared.tokens, branches, prepared.media, observed, sources)

    def recorded(self, turn: Turn) -> Reading:
        """Return what the model read before a turn that was written down.

        Raises:
            StoreError: media are lost.
        """
        # The first turn of a player has read its prompt, too.
        branches, media = turn.parent == ROOT, self._start.media if not self.turns else self.media
        if self._prepare is not None and branches and (self.turns or (turn.media and not turn.media[0].start)):
            media = self._prepare.none
        for one in turn.media if self._prepare is not None else ():
            assert self._prepare is not None and media is not None  # noqa: S101, PT018 of a model with media
            media = self._prepare.again(media, one)
        sources = [source for one in turn.media for source in one.sources]
        if branches and not self.turns and not (turn.media and not turn.media[0].start):
            sources = [*self._start.sources, *sources]
        return Reading(turn.observed, branches, media, turn.media, sources)

    def _rendered(self, messages: list[dict[str, Any]]) -> tuple[Array, bool]:
        """Return the tokens of an observation, and whether they are those of a new sequence."""
        if not self.length:
            tokens = self._conversation.prompt([*self._messages, *messages])
            if not len(tokens):
                of_player = f" of player {self.name}" if self.name else ""
                msg = (
                    f"the first one{of_player} is empty, but it is the prompt with environment.prompt = "
                    '"environment"; return a text'
                )
                raise RowError(msg)
            return tokens, False
        if not self.turns:
            if not messages:
                return NO_TOKENS, False
            if self._messages:
                return self._conversation.prompt([*self._messages, *messages]), True
            return self._conversation.extend((), NO_TOKENS, messages).token_ids, False
        last = self._forest.turns[self.turns[-1]]
        extension = self._conversation.extend(self._messages, last.tokens, messages)
        if extension.is_faithful:
            return extension.token_ids, False
        return self._conversation.prompt([*self._messages, self._answer, *messages]), True

    @property
    def _answer(self) -> dict[str, Any]:
        """The player's last answer as a message."""
        return {"role": "assistant", "content": self._conversation.text(self._forest.turns[self.turns[-1]].tokens)}

    def read(self, messages: list[dict[str, Any]], reading: Reading) -> int:
        """Append an observation that `render` gave; return the number of its tokens behind the prompt."""
        if self.turns:
            self._messages += [self._answer]
        self._messages += messages
        self._sources = [*([] if reading.branches else self._sources), *reading.sources]
        self.media = reading.media
        cost = len(reading.tokens) if self.turns else 0
        if reading.branches:
            if self.turns:
                self.branches += 1
                cost = max(0, cost - self.length)
            self._parent, self._ids, self._read, self._observed = ROOT, NO_TOKENS, NO_TOKENS, []
        self._read = np.concatenate([self._read, reading.tokens]) if len(self._read) else reading.tokens
        self._observed = [*self._observed, *reading.observed]
        return cost

    def drop_context(self, *, branches: bool) -> None:
        """Forget the last observation, which leaves no room for an answer: the trainer need not read it."""
        if branches and self.turns:
            self.branches -= 1

    def next_turn(self, generated: tuple[Array, Array, Array], reason: str, experts: Array | None) -> Turn:
        """Return the turn that continues what the model has read.

        Args:
            generated: its tokens, log-probs and versions.
            reason: why it ended.
            experts: experts chosen for its tokens; see `Turn`.
        """
        read = self._read.astype(np.int32)
        return Turn(
            self._parent, read, *generated, reason, player=self.name, media=list(self._observed), experts=experts
        )

    def write(self, number: int) -> None:
        """Go on behind a turn of the forest."""
        turn = self._forest.turns[number]
        self._ids = np.concatenate([self._ids, turn.observed, turn.tokens]).astype(np.int32)
        self._parent, self._read, self._observed = number, NO_TOKENS, []
        self.turns.append(number)

    def prompt(self) -> TokenSequence:
        """Return the sequence of a player without turns, none of whose tokens is trained."""
        return untrained(self._start.tokens, self.name, self._start.observed)


def untrained(tokens: Array, player: str = "", observed: ObservedMedia | None = None) -> TokenSequence:
    """Return a sequence of tokens that no policy sampled."""
    n = len(tokens)
    versions, spans = np.full(n, NOT_SAMPLED, np.int32), np.zeros((0, 2), np.int32)
    media = () if observed is None else (observed,)
    return TokenSequence(
        tokens.astype(np.int32), np.zeros(n, np.bool_), np.zeros(n, np.float32), versions, spans, None, player, media
    )
