"""What the model reads between the turns of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from broker.codec import Array
from relax_actors.data.media_fields import plain_messages
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.errors import RowError
from relax_actors.messages import MediaSource, Turn
from relax_actors.messages.session_log import ROOT
from relax_actors.sessions.conversation import Conversation
from relax_actors.sessions.episode_start import Start
from relax_actors.sessions.forest import Continuation, Forest

Message = dict[str, Any]
NO_TOKENS = np.zeros(0, np.int32)


class EpisodeReader:
    """Turns observations into tokens that continue a turn, or begin a new sequence.

    Attributes:
        media: media of the sequence up to the end of each turn; those of the prompt under `ROOT`.
    """

    def __init__(self, start: Start, conversation: Conversation, forest: Forest) -> None:
        self._start, self._conversation, self._forest = start, conversation, forest
        self.media: dict[int, PromptMedia | None] = {ROOT: start.media}

    def read(self, parent: int, new: Sequence[Message], player: str, where: str) -> Continuation:
        """Return what the model reads of an observation, behind a turn of its player or `ROOT`.

        `where` names the observation in errors.

        Raises:
            RowError: the messages cannot be rendered or give no token to begin with, or their media cannot be read.
        """
        prepare, sources, row = self._start.prepare, list[MediaSource](), self._start.row
        where = f"{where} of {row}"
        if prepare is not None:
            new, sources = prepare.admit_messages(new, row, where)
        tokens = self._extension(parent, new)
        base = self._base(parent, is_new=tokens is None)
        if tokens is None:
            tokens, sources = self._conversation.prompt([*base.new, *new]), [*self._sources(parent), *sources]
            if parent == ROOT and not len(tokens):
                of_player = f" of player {player}" if player else ""
                msg = (
                    f"the first one{of_player} is empty, but it is the prompt with environment.prompt = "
                    '"environment"; return a text'
                )
                raise RowError(msg)
        media, shown = base.media, base.shown
        if prepare is not None and media is not None and len(tokens):
            length = self._forest.length(base.parent) + len(base.observed)
            read = prepare.append(length, media, tokens, sources, row, where)
            tokens, media, shown = read.tokens, read.media, [*shown, *([read.observed] if read.observed else [])]
        return Continuation(base.parent, np.concatenate([base.observed, tokens]), [*base.new, *new], media, shown)

    def repeat(self, parent: int, new: Sequence[Message], turn: Turn) -> Continuation:
        """Return what a recorded turn has read; raises StoreError if its media are lost."""
        base, prepare = self._base(parent, is_new=turn.parent == ROOT and parent != ROOT), self._start.prepare
        media = base.media
        if prepare is not None:
            for one in turn.media:
                reader = prepare.reader
                media = reader.observed(reader.none if one.start == 0 or media is None else media, [one])
        return Continuation(base.parent, turn.observed, [*base.new, *plain_messages(new)], media, turn.media)

    def _base(self, parent: int, *, is_new: bool) -> Continuation:
        """Return what precedes an observation: a new sequence starts with the conversation."""
        start, none = self._start, None if self._start.prepare is None else self._start.prepare.reader.none
        if is_new:
            said = start.messages if parent == ROOT else self._forest.conversation(parent)
            return Continuation(ROOT, NO_TOKENS, said, none)
        if parent != ROOT:
            return Continuation(parent, NO_TOKENS, [], self.media[parent])
        return Continuation(ROOT, start.tokens, start.messages, start.media, [start.observed] if start.observed else [])

    def _extension(self, parent: int, new: Sequence[Message]) -> Array | None:
        """Return the tokens of messages behind a turn; None if they start a new sequence."""
        if parent != ROOT:
            answer, history = self._forest.turns[parent].tokens, self._forest.conversation(parent)[:-1]
            extension = self._conversation.extend(history, answer, new)
            return extension.token_ids if extension.is_faithful else None
        if not len(self._start.tokens) or (new and self._start.messages):
            return None
        return self._conversation.extend((), NO_TOKENS, new).token_ids if new else NO_TOKENS

    def _sources(self, parent: int) -> list[MediaSource]:
        """Return the files of the media of the sequence that ends with a turn."""
        shown = [one for number in self._forest.path(parent) for one in self._forest.turns[number].media]
        own = () if shown and shown[0].start == 0 else self._start.sources
        return [*own, *(source for one in shown for source in one.sources)]
