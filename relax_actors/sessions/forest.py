"""Forest of a session: every answer that the policy gave, and what it continued. Pure.

A request of an agent carries the whole conversation. It continues the longest beginning of it that an answer of this
session ended; what follows are observations. A request that continues no answer begins a tree of its own. A path from a
root to a leaf is one token sequence, exactly as the model read and wrote it.

Invariant: a turn never changes, and its parent has a smaller number, so that a list of turns is the whole state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relax_actors.engines.protocols import Generation
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.messages import ObservedMedia
from relax_actors.messages.experts import compact, expand
from relax_actors.messages.samples import NOT_SAMPLED, TokenSequence
from relax_actors.messages.session_log import ROOT, Turn

Array = NDArray[Any]
Branches: TypeAlias = Literal["all", "last"]
"""Which leaves are exported: all of them, or that of each player's last turn alone."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the policy reads before a turn.

    Attributes:
        parent: turn that it continues, or `ROOT`.
        observed: `[len] int32`, tokens behind the parent.
        new: messages behind the parent.
        media: media of the sequence up to here; None for a model that reads text only.
        shown: media of `observed`, as a cell holds them.
    """

    parent: int
    observed: Array
    new: Sequence[dict[str, Any]]
    media: PromptMedia | None = None
    shown: Sequence[ObservedMedia] = ()

    def turn(self, answer: Generation, before: int, message: dict[str, Any], **names: str) -> Turn:
        """Return the turn of an answer.

        Args:
            answer: the answer.
            before: tokens up to the end of the parent.
            message: the answer as a message.
            names: further fields of the turn.
        """
        experts = answer.routed_experts
        return Turn(
            self.parent,
            self.observed.astype(np.int32),
            answer.tokens,
            answer.logprobs,
            answer.versions,
            str(answer.finish_reason),
            messages=[*self.new, message],
            media=list(self.shown),
            experts=None if experts is None else compact(experts[max(0, before - 1) :]),
            entropies=answer.entropies,
            **names,
        )


class Forest:
    """The turns of one session, with those of an earlier incarnation in order.

    An agent that was restarted asks again what it asked before. It gets the recorded answers, in their order, as long
    as it asks the same (`replayed`). `beginnings` counts the calls of `forget`.
    """

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self.turns: list[Turn] = []
        self._lengths: list[int] = []
        self._by_state: dict[str, int] = {}
        self._by_asked: dict[str, list[int]] = {}
        self._by_call: dict[str, int] = {}
        self._given: Counter[str] = Counter()
        self._used: set[int] = set()
        self.beginnings = 0
        # Turns whose answer may not have reached the agent, and the gateway that delivers it; empty if none does.
        self._in_doubt: dict[int, str] = {}
        # Turns whose client has left without the answer, and has not asked for it again.
        self._departed: set[int] = set()
        for turn in turns:
            self.add(turn)

    def add(self, turn: Turn, *, is_used: bool = True, is_known: bool = True, deliverer: str = "") -> int:
        """Add a turn; return its number; raises ValueError if its parent does not exist.

        The current agent receives a turn that `is_used`; its successor gets another one by repeating the request. A
        turn of before `forget` is not `is_known`, and only counted. `deliverer` is the incarnation of the gateway that
        delivers it, if it lives.
        """
        number = len(self.turns)
        if not ROOT <= turn.parent < number:
            msg = f"turn {number} of a session continues turn {turn.parent}, which does not exist"
            raise ValueError(msg)
        self.turns.append(turn)
        self._lengths.append(self.length(turn.parent) + len(turn.observed) + len(turn.tokens))
        if not is_known:
            return number
        if turn.state:
            self._by_state[turn.state] = number
        if turn.asked:
            self._by_asked.setdefault(turn.asked, []).append(number)
        if is_used:
            self._given[turn.asked] = len(self._by_asked.get(turn.asked, ()))
            self._give([number], deliverer)
        self.arrived(turn.parent)  # it was continued
        if turn.call:
            self._by_call[turn.call] = number
        return number

    def continued(self, keys: Sequence[str]) -> tuple[int, int]:
        """Return the turn that a request continues, and how many of its messages that turn covers.

        `keys` are those of `conversation_keys`; `(ROOT, 0)` is a request that continues no turn.
        """
        for count in range(len(keys) - 1, 0, -1):
            if (number := self._by_state.get(keys[count])) is not None:
                return number, count
        return ROOT, 0

    def restart(self) -> None:
        """Start a replay: the agent was restarted; turns that it does not reach stay unused."""
        self._given.clear()
        self._used.clear()
        self._in_doubt.clear()
        self._departed.clear()

    def forget(self) -> None:
        """Start over: earlier turns answer no request, but their numbers stay taken for seeds."""
        self.restart()
        self.beginnings += 1
        for index in (self._by_state, self._by_asked, self._by_call):
            index.clear()

    def keep(self, turns: Iterable[int]) -> None:
        """End the session: these turns are exported, and none that is added later."""
        self._used = {number for number in turns if number < len(self.turns)}
        self._in_doubt.clear()
        self._departed.clear()

    def _give(self, numbers: Iterable[int], deliverer: str) -> list[int]:
        given = list(numbers)
        self._used.update(given)
        self._in_doubt |= dict.fromkeys(given, deliverer)
        self._departed.difference_update(given)
        return given

    def arrived(self, number: int) -> None:
        """Note that the agent has the answer of a turn."""
        self._in_doubt.pop(number, None)
        self._departed.discard(number)

    def departed(self, number: int) -> None:
        """Note that the agent left without an answer; a repeated request gets it.

        Until then the turn is not exported.
        """
        if number in self._in_doubt:
            self._in_doubt[number] = ""
            self._departed.add(number)

    def replayed(
        self, asked: str, call: str = "", *, n: int = 1, is_retry: bool = False, deliverer: str = ""
    ) -> list[int]:
        """Return the recorded turns that answer a request; empty if they must be generated.

        Args:
            asked: key of the conversation and of `n`, so that all requests with it have the same number of answers.
            call: id of the request; the same id always has the same answers.
            n: number of answers.
            is_retry: the client repeats a request whose answers it did not get.
            deliverer: incarnation of the gateway that asks. An answer that another gateway has not delivered counts as
                not received.
        """
        if call and (first := self._by_call.get(call)) is not None:
            return self._give(range(first, first + n), deliverer)
        answers, given = self._by_asked.get(asked, []), self._given[asked]
        newest = answers[max(0, given - n) : given]
        if newest and (is_retry or all(self._in_doubt.get(number, deliverer) != deliverer for number in newest)):
            return self._give(newest, deliverer)
        following = answers[given : given + n]
        self._given[asked] += len(following)
        return self._give(following, deliverer)

    def path(self, number: int) -> list[int]:
        """Return the turns from a root to a turn."""
        path = []
        while number != ROOT:
            path.append(number)
            number = self.turns[number].parent
        return path[::-1]

    def tokens(self, number: int) -> Array:
        """Return all tokens that the model read and wrote up to the end of a turn, `[len] int32`."""
        parts = [part for n in self.path(number) for part in (self.turns[n].observed, self.turns[n].tokens)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def length(self, number: int) -> int:
        """Return the number of `tokens` of a turn; 0 for `ROOT`."""
        return 0 if number == ROOT else self._lengths[number]

    def conversation(self, number: int) -> list[dict[str, Any]]:
        """Return the messages from a root to a turn."""
        return [message for n in self.path(number) for message in self.turns[n].messages]

    @property
    def used(self) -> int:
        """Number of turns that the present agent has asked for."""
        return len(self._used)

    def exported(self) -> set[int]:
        """Return the used turns whose answers the agent received or requested again."""
        parents = {self.turns[number].parent for number in self._used}
        return self._used - (self._departed - parents)

    @property
    def last(self) -> int:
        """The newest exported turn; `ROOT` if there is none."""
        return max(self.exported(), default=ROOT)

    def said(self, players: Sequence[str] = ("",)) -> list[dict[str, Any]]:
        """Return each player's conversation up to its newest exported turn."""
        newest = self._newest()
        return [
            {**message, "player": player} if player else message
            for player in players
            if player in newest
            for message in self.conversation(newest[player])
        ]

    def _newest(self) -> dict[str, int]:
        """Return the newest exported turn of each player."""
        return {self.turns[number].player: number for number in sorted(self.exported())}

    def leaves(self) -> list[int]:
        """Return the exported turns that no exported turn continues."""
        exported = self.exported()
        return sorted(exported - {self.turns[number].parent for number in exported})

    def sequences(self, branches: Branches = "all", *, players: Sequence[str] = ("",)) -> list[TokenSequence]:
        """Return the token sequences of the exported leaves, those of a player together.

        A turn that several sequences share is trained in the first of them and context in the others, so that each
        sampled token is trained at most once; with `branches = "all"` exactly once. "last" exports the leaf of each
        player's last turn.
        """
        leaves = sorted(self.leaves(), key=lambda leaf: (players.index(self.turns[leaf].player), leaf))
        if branches == "last":
            leaves = [leaf for leaf in leaves if leaf in self._newest().values()]
        trained: set[int] = set()
        sequences = []
        for leaf in leaves:
            path = self.path(leaf)
            sequences.append(self._sequence(path, trained))
            trained.update(path)
        return sequences

    def _sequence(self, path: Sequence[int], trained: set[int]) -> TokenSequence:
        turns = [self.turns[number] for number in path]
        tokens, mask, logprobs, versions, spans = [], [], [], [], []
        length = 0
        for number, turn in zip(path, turns, strict=True):
            before, own = len(turn.observed), len(turn.tokens)
            tokens += [turn.observed, turn.tokens]
            mask += [np.zeros(before, np.bool_), np.full(own, number not in trained)]
            logprobs += [np.zeros(before, np.float32), turn.logprobs]
            versions += [np.full(before, NOT_SAMPLED, np.int32), turn.versions]
            spans.append((length + before, length + before + own))
            length += before + own
        experts = [turn.experts for turn in turns if turn.experts is not None]
        return TokenSequence(
            np.concatenate(tokens).astype(np.int32),
            np.concatenate(mask),
            np.concatenate(logprobs).astype(np.float32),
            np.concatenate(versions).astype(np.int32),
            np.array(spans, np.int32).reshape(-1, 2),
            np.concatenate([expand(one) for one in experts]) if len(experts) == len(turns) else None,
            turns[-1].player,
            tuple(one for turn in turns for one in turn.media),
            _entropies(turns),
        )


def _entropies(turns: Sequence[Turn]) -> Array | None:
    """Return the entropies of a sequence, `[len] float32`; None unless all are known."""
    parts: list[Array] = []
    for turn in turns:
        if turn.entropies is None and len(turn.tokens):
            return None
        own = np.zeros(0, np.float32) if turn.entropies is None else turn.entropies
        parts += [np.zeros(len(turn.observed), np.float32), own]
    return np.concatenate(parts).astype(np.float32)


def untrained(tokens: Array, player: str = "", observed: ObservedMedia | None = None) -> TokenSequence:
    """Return a sequence of tokens that no policy sampled."""
    n = len(tokens)
    versions, spans = np.full(n, NOT_SAMPLED, np.int32), np.zeros((0, 2), np.int32)
    media = () if observed is None else (observed,)
    return TokenSequence(
        tokens.astype(np.int32), np.zeros(n, np.bool_), np.zeros(n, np.float32), versions, spans, None, player, media
    )
